"""ReasoningGym-v0: any data set of the package reasoning-gym; an episode is one question and one answer.

The package generates the questions and scores the answers; each seed makes a data set of one question. It is optional:
`pip install reasoning-gym`.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import gymnasium

from roll_flash.chat.model_text import last_answer
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.base import TextSpace
from roll_flash.envs.rewards.evaluated_answers import UnsafeAnswerError, check_answer
from roll_flash.envs.rewards.scoring_process import (
    ScoringEndedError,
    register_user,
    score_in_subprocess,
    unregister_user,
)
from roll_flash.errors import ConfigError, EnvError

logger = logging.getLogger("roll_flash.envs")

WRONG_SCORERS = {
    "coin_flip": "the answer 0 earns 1 for all questions but those whose answer is 1",
    "game_of_life_halting": "any answer earns 1 for every question",
    "propositional_logic": "the premises of a question, copied and joined, earn 1",
}
"""Data sets of reasoning-gym 0.1.25 with a wrong scorer; docs/adapters.md has the reasons."""
MAX_SEEDS = 1 << 31
MAX_ERROR_CHARACTERS = 1000
MAX_CHARACTERS, MAX_LENGTH_RATIO = 2000, 20
"""Limit on an answer's characters, and relative to the right one: quadratic scorers would exceed any step timeout."""


class ReasoningGym(gymnasium.Env[str, str]):
    """Arguments: `dataset` (its name), `config` (the data set's own options; for `composite`, a mixture,
    `datasets`: a list of `{name, weight, config}`).

    The answer is the text in `<answer>`, else the whole text. The reward is the package's score, 0 to 1. Some of its
    scorers evaluate answers as Python: they get only data and plain arithmetic, all else has reward 0.
    """

    observation_space = TextSpace()
    action_space = TextSpace()

    def __init__(self, dataset: str = "basic_arithmetic", config: Mapping[str, Any] | None = None) -> None:
        self._name = dataset
        self._config = dict(config or {})
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._open(0)
        for name in (dataset, *(part["name"] for part in self._config.get("datasets", ()))):
            _warn_of(name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        register_user(self)
        self._dataset = self._open(int(self.np_random.integers(MAX_SEEDS)) if seed is None else seed)
        self._entry = self._dataset[0]
        return f"{self._entry['question']}\nReply with <answer>YOUR ANSWER</answer>.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = last_answer(action)
        score, trouble = self._score(answer) if answer else (0.0, "")
        info = {"success": score >= 1.0, "answer": answer[:1000], **({"score_error": trouble} if trouble else {})}
        return "", score, True, False, info

    def close(self) -> None:
        unregister_user(self)

    def oracle(self) -> str:
        """Return the right answer, for checks and demonstrations."""
        if self._entry["answer"] is None:
            raise EnvError(f"the data set {self._name} tells no answer to its questions")
        return f"<answer>{self._entry['answer']}</answer>"

    def _score(self, answer: str) -> tuple[float, str]:
        """Return the score and an error text. An answer for which the scorer raises, or which it would run as code, is
        wrong, and the error is noted.

        Raises EnvError for errors that no answer can cause: a missing package or file of the scorer.
        """
        right = self._entry["answer"]
        most = max(MAX_CHARACTERS, MAX_LENGTH_RATIO * len(str(right or "")))
        if len(answer) > most:
            return 0.0, f"the answer is longer than {most} characters"
        score, trouble, fault = self._score_in_subprocess(answer)
        if fault and (right is None or self._score_in_subprocess(str(right))[2]):
            raise EnvError(f"the scorer of the data set {self._name}: {fault}")
        return score, trouble or fault

    def _score_in_subprocess(self, answer: str) -> tuple[float, str, str]:
        work = partial(_scored, self._dataset, self._scorer, self._entry, answer)
        try:
            score, trouble, fault = score_in_subprocess(work, modules=(__name__, "reasoning_gym"))
        except ScoringEndedError as error:
            return 0.0, f"the answer is not scored: {error}", ""
        return score, trouble, fault

    @property
    def _scorer(self) -> Any:
        """The data set, or the part of a mixture from which the question comes."""
        parts = getattr(self._dataset, "datasets", None) or {}
        return parts.get(self._entry.get("metadata", {}).get("source_dataset"), self._dataset)

    def _open(self, seed: int) -> Any:
        package = import_optional("reasoning_gym", package="reasoning-gym", needed_by="ReasoningGym-v0")
        try:
            config = self._config
            if self._name == "composite":
                spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
                config = {**config, "datasets": [spec(**{"config": {}, **one}) for one in config.get("datasets", ())]}
            return package.create_dataset(self._name, **{"seed": seed % MAX_SEEDS, "size": 1, **config})
        except (ValueError, AssertionError, TypeError) as error:
            raise ConfigError(f"ReasoningGym-v0: dataset {self._name!r} with {self._config}: {error}") from None


@cache
def _warn_of(dataset: str) -> None:
    """Warn of a data set with a wrong scorer, once per process."""
    if dataset in WRONG_SCORERS:
        logger.warning(
            "ReasoningGym-v0: the scorer of the data set %s is wrong: %s; a policy learns nothing from it",
            dataset,
            WRONG_SCORERS[dataset],
        )


def _scored(dataset: Any, scorer: Any, entry: dict[str, Any], answer: str) -> tuple[float, str, str]:
    """Return the score, an error caused by the answer, and an error caused by it only if the right answer has none."""
    try:
        check_answer(answer, scorer, str(entry["answer"] or ""))
        if entry["metadata"].get("source_dataset") == "puzzle24" and (wrong := _not_24(answer, entry["metadata"])):
            return 0.0, wrong, ""
        score = float(dataset.score_answer(answer=answer, entry=entry))
        return (score, "", "") if 0.0 <= score <= 1.0 else (0.0, f"the score is {score:g}, not from 0 to 1", "")
    except UnsafeAnswerError as error:
        return 0.0, f"the answer is not scored: {error}", ""
    except (ImportError, OSError) as error:
        return 0.0, "", f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
    except Exception as error:  # third-party code may raise anything
        return 0.0, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS], ""


def _not_24(answer: str, about: Mapping[str, Any]) -> str:
    """Return what is wrong with an answer to puzzle24 that its scorer does not see. It compares no numbers, so that
    `1*2*3*4` solves every question, and leaves out what is behind the point, so that 49/2 is 24."""
    if sorted(map(int, re.findall("[0-9]+", answer))) != sorted(about["numbers"]):
        return "the answer has other numbers than the question"
    return "" if importlib.import_module("sympy").parse_expr(answer) == 24 else "the result is not 24"
