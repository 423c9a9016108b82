"""ReasoningGym-v0: any data set of the package reasoning-gym, one question and one answer an episode.

The package generates the questions and scores the answers; each seed makes a data set of one question. It is optional:
`pip install reasoning-gym`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import gymnasium
from roll_flash.envs.evaluated_answers import EvaluatedAnswerError, check_answer
from roll_flash.envs.model_text import tagged
from roll_flash.envs.optional_package import import_optional
from roll_flash.envs.scoring_process import ScoringEndedError, join, leave, score_apart
from roll_flash.envs.text_space import TextSpace
from roll_flash.envs.tool_calls import without_thinking

from roll_flash.errors import ConfigError, EnvError

logger = logging.getLogger("roll_flash.envs")

WRONG_SCORERS = {
    "coin_flip": "the answer 0 earns 1 for all questions but those whose answer is 1",
    "game_of_life_halting": "any answer earns 1 for every question",
}
"""Of reasoning-gym 0.1.25; docs/adapters.md has the reasons."""
MOST_SEEDS = 1 << 31
MOST_TROUBLE_CHARACTERS = 1000
LONGEST_CHARACTERS, TIMES_AS_LONG = 2000, 20
"""Of an answer, and compared with the right one: some scorers take the square of its length, past any step's time."""


class ReasoningGym(gymnasium.Env[str, str]):
    """Arguments: `dataset` (its name), `config` (the data set's own options; of `composite`, which mixes others,
    `datasets`: a list of `{name, weight, config}`).

    The answer is what stands in `<answer>`, else the whole text. Reward is the package's score, 0 to 1. Some of its
    scorers evaluate answers as Python: of those only data and plain arithmetic are scored, all else is worth 0.
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
        join(self)
        self._dataset = self._open(int(self.np_random.integers(MOST_SEEDS)) if seed is None else seed)
        self._entry = self._dataset[0]
        return f"{self._entry['question']}\nReply with <answer>YOUR ANSWER</answer>.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text = without_thinking(action)
        found = tagged(text, "answer")
        answer = (found[-1] if found else text).strip()
        score, trouble = self._score(answer) if answer else (0.0, "")
        info = {"success": score >= 1.0, "answer": answer[:1000], **({"score_error": trouble} if trouble else {})}
        return "", score, True, False, info

    def close(self) -> None:
        leave(self)

    def oracle(self) -> str:
        """The right action now, for checks and demonstrations."""
        if self._entry["answer"] is None:
            raise EnvError(f"the data set {self._name} tells no answer to its questions")
        return f"<answer>{self._entry['answer']}</answer>"

    def _score(self, answer: str) -> tuple[float, str]:
        """Some scorers of the package raise for text that is no answer at all: that is a wrong answer, and is noted.
        So is an answer that a scorer would run as code.

        Raises EnvError for what no answer can be to blame for: a package or file of the scorer that is missing.
        """
        right = self._entry["answer"]
        most = max(LONGEST_CHARACTERS, TIMES_AS_LONG * len(str(right or "")))
        if len(answer) > most:
            return 0.0, f"the answer is longer than {most} characters"
        score, trouble, fault = self._scored_apart(answer)
        if fault and (right is None or self._scored_apart(str(right))[2]):
            raise EnvError(f"the scorer of the data set {self._name}: {fault}")
        return score, trouble or fault

    def _scored_apart(self, answer: str) -> tuple[float, str, str]:
        work = partial(_scored, self._dataset, self._scorer, self._entry, answer)
        try:
            score, trouble, fault = score_apart(work, modules=(__name__, "reasoning_gym"))
        except ScoringEndedError as error:
            return 0.0, f"the answer is not scored: {error}", ""
        return score, trouble, fault

    @property
    def _scorer(self) -> Any:
        """The data set itself, or that of a mixture from which the question comes."""
        parts = getattr(self._dataset, "datasets", None) or {}
        return parts.get(self._entry.get("metadata", {}).get("source_dataset"), self._dataset)

    def _open(self, seed: int) -> Any:
        package = import_optional("reasoning_gym", package="reasoning-gym", needed_by="ReasoningGym-v0")
        try:
            config = self._config
            if self._name == "composite":
                spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
                config = {**config, "datasets": [spec(**{"config": {}, **one}) for one in config.get("datasets", ())]}
            return package.create_dataset(self._name, **{"seed": seed % MOST_SEEDS, "size": 1, **config})
        except (ValueError, AssertionError, TypeError) as error:
            raise ConfigError(f"ReasoningGym-v0: dataset {self._name!r} with {self._config}: {error}") from None


@cache
def _warn_of(dataset: str) -> None:
    """Once in a process."""
    if dataset in WRONG_SCORERS:
        logger.warning(
            "ReasoningGym-v0: the scorer of the data set %s is wrong: %s; a policy learns nothing from it",
            dataset,
            WRONG_SCORERS[dataset],
        )


def _scored(dataset: Any, scorer: Any, entry: dict[str, Any], answer: str) -> tuple[float, str, str]:
    """The score, what the answer is to blame for, and what it is to blame for if the right one fares better."""
    try:
        check_answer(answer, scorer, str(entry["answer"] or ""))
        score = float(dataset.score_answer(answer=answer, entry=entry))
        return (score, "", "") if 0.0 <= score <= 1.0 else (0.0, f"the score is {score:g}, not from 0 to 1", "")
    except EvaluatedAnswerError as error:
        return 0.0, f"the answer is not scored: {error}", ""
    except (ImportError, OSError) as error:
        return 0.0, "", f"{type(error).__name__}: {error}"[:MOST_TROUBLE_CHARACTERS]
    except Exception as error:  # others' code may raise anything
        return 0.0, f"{type(error).__name__}: {error}"[:MOST_TROUBLE_CHARACTERS], ""
