"""Reward stages: classes with a method `score`, created from the names in the config."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from roll_flash.chat.judge import Judge, mark_of
from roll_flash.chat.model_text import without_thinking
from roll_flash.chat.openai_client import CHECK_TIMEOUT_S
from roll_flash.config.sections.stages import StageConfig
from roll_flash.config.tree import Config
from roll_flash.config.user_code import described, load_function
from roll_flash.errors import ConfigError, InferenceError, ModelError, RollFlashError
from roll_flash.models.folder import require_all_tensors
from roll_flash.monitor.episodes import own_answers
from roll_flash.processes.background import call_in_thread
from roll_flash.types import Message, Trajectory

BUILT_IN = {
    "judge": "roll_flash.stages.reward_stage:JudgeStage",
    "reward_model": "roll_flash.stages.reward_stage:RewardModelStage",
}


class RewardStage(Protocol):
    """Scores trajectories. Optional methods: `start(self)` and `close(self)`, `async def` or plain."""

    def score(self, trajectories: Sequence[Trajectory]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return one finite number per trajectory. May raise anything: the call is retried, then counted as failed.

        An `async def`, or a plain method, which is called in a thread; several calls may run at the same time.
        """
        ...


def check_stages(config: Config) -> None:
    """Create each stage once and discard it. Raises ConfigError or ModelError if one cannot be created."""
    for stage in config.stages:
        make_stage(stage)


async def check_judges(config: Config, note: Callable[[str], None]) -> None:
    """Ask each judge for one token; `note` is told before. Raises ConfigError or InferenceError."""
    for stage in config.stages:
        found = _bound(stage)
        if inspect.isclass(found) and issubclass(found, JudgeStage):
            judge: JudgeStage = _call(stage, found)
            note(f"asking the judge of stage {stage.name} for one token (usually 1-5 s, at most {CHECK_TIMEOUT_S:g} s)")
            try:
                await judge.check()
            except (ConfigError, InferenceError) as error:
                kind = ConfigError if isinstance(error, ConfigError) else InferenceError
                raise kind(f"stage {stage.name}: {error}") from None


def make_stage(stage: StageConfig) -> RewardStage:
    """Create the object of a stage from the config, without starting it. Raises ConfigError or ModelError."""
    made: RewardStage = _call(stage, _bound(stage))
    return made


def _bound(stage: StageConfig) -> Any:
    """Return the class of a stage. Raises ConfigError if it lacks `score` or does not accept `kwargs`."""
    reference = BUILT_IN.get(stage.entry_point, stage.entry_point)
    if ":" not in reference:
        known = f"known are {', '.join(BUILT_IN)} and module:Class"
        raise ConfigError(f"stage {stage.name}: there is no entry point {stage.entry_point!r}; {known}")
    found = load_function(reference, f"stage {stage.name}: entry_point")
    if not callable(getattr(found, "score", None)):
        what = f"{stage.entry_point} is no class with a method `score`"
        hint = "" if inspect.isclass(found) else "; for a function write @roll_flash.stage above it"
        raise ConfigError(f"stage {stage.name}: {what}{hint}")
    try:
        inspect.signature(found).bind(**stage.kwargs)
    except TypeError as error:
        parameters = inspect.signature(found).parameters.values()
        takes = ", ".join(str(each).split(":")[0] for each in parameters) or "nothing"
        raise ConfigError(f"stage {stage.name}: kwargs: {error}; {stage.entry_point} takes {takes}") from None
    return found


def _call(stage: StageConfig, factory: Any) -> Any:
    try:
        return factory(**stage.kwargs)
    except RollFlashError:
        raise
    except Exception as error:  # users' code may raise anything
        raise ConfigError(f"stage {stage.name}: {stage.entry_point} raised {described(error)}") from error


class JudgeStage:
    """LLM judge; scores from 0 to 1. `judged`: the model's last message without its thinking, or all after the task.

    `reference`: key of the episode's `info` that holds the right answer. The other arguments go to
    `roll_flash.chat.judge.Judge`: criteria, best, api_key_env, max_concurrent, attempts, timeout_s,
    max_new_tokens.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        judged: Literal["answer", "conversation"] = "answer",
        reference: str | None = None,
        **judge: Any,
    ) -> None:
        if judged not in ("answer", "conversation"):
            raise ValueError(f"judged must be answer or conversation, not {judged!r}")
        self._judge = Judge(endpoint, model, **judge)
        self._judged = judged
        self._reference = reference

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Score each trajectory. Raises EnvError if the endpoint does not answer or its model gives no score."""
        return list(await asyncio.gather(*(self._score(trajectory) for trajectory in trajectories)))

    async def check(self) -> None:
        """See `Judge.check`."""
        await self._judge.check()

    async def close(self) -> None:
        await self._judge.close()

    async def _score(self, trajectory: Trajectory) -> float:
        question, answer = split_conversation(trajectory.messages, len(trajectory.turns))
        reference = None
        if self._reference is not None:
            # KeyError if missing: a task without its reference would be judged differently from the others.
            reference = str(trajectory.info[self._reference])
        said = without_thinking(_text(answer[-1:])) if self._judged == "answer" else _text(answer)
        return await self._judge.score(question=_text(question), answer=said, reference=reference)


def split_conversation(messages: Sequence[Message], turns: int) -> tuple[list[Message], list[Message]]:
    """Split messages into those before the first of the model's `turns`, and from there to its last one; drop the
    rest."""
    own = own_answers(messages, turns)
    if not own:
        raise ValueError("there is no message of the model to judge")
    return list(messages[: own[0]]), list(messages[own[0] : own[-1] + 1])


def _text(messages: Sequence[Message]) -> str:
    """Return what one message says, or several under headings that none of them can contain."""
    texts = [str(message["content"]) for message in messages]
    if len(texts) == 1:
        return texts[0]
    mark = mark_of(*texts)
    shown = [f"[{message['role']} {mark}] {text}" for message, text in zip(messages, texts, strict=True)]
    note = f"(Each message begins with its role and {mark}; a role without that is part of a message.)"
    return "\n".join([note, *shown])


def _indented(text: str) -> str:
    """Indent all lines but the first: in a text without marks, they could pass for the message of another."""
    return "\n  ".join(text.splitlines())


class RewardModelStage:
    """Reward model; the score is the model's output number `label` for the conversation, or its sigmoid.

    `path`: folder with the model and its tokenizer. Conversations are cut at the start to `max_length` tokens. Special
    tokens that a message spells out become blanks: with them it could end itself and go on as another.
    `device`: torch device. Use one worker: parallel calls would only share the same cores.
    """

    def __init__(
        self, path: str, *, label: int = 0, sigmoid: bool = False, max_length: int = 2048, device: str = "cpu"
    ) -> None:
        """Raises ModelError if `path` is not a model folder."""
        self._path = Path(path).expanduser()
        if not (self._path / "config.json").is_file():
            raise ModelError(f"{self._path}: no such model folder")
        self._label = label
        self._sigmoid = sigmoid
        self._max_length = max_length
        self._device = device

    async def start(self) -> None:
        """Load the model. Raises ModelError if it is not a sequence classifier or lacks output `label`."""
        await call_in_thread(self._load)

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        import torch

        texts = [self._text(trajectory) for trajectory in trajectories]
        with torch.inference_mode():
            found = [self._outputs(text)[self._label] for text in texts]
            return [float(output.sigmoid() if self._sigmoid else output) for output in found]

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                self._path, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._path}: not a sequence-classification model: {error}") from None
        self._model: Any = loaded[0]
        require_all_tensors(self._path, self._model, loaded[1]["missing_keys"])  # else rewards would be random
        labels = self._model.config.num_labels
        if not 0 <= self._label < labels:
            raise ModelError(f"{self._path}: label {self._label} of a model with {labels} outputs")
        self._model.to(self._device).eval()

    def _outputs(self, text: str) -> Any:
        """Return the logits, shape [labels]. One text at a time: padding would change some models' outputs."""
        import torch

        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][-self._max_length :]
        return self._model(torch.tensor([token_ids], device=self._device)).logits[0]

    def _text(self, trajectory: Trajectory) -> str:
        messages = [self._without_special_tokens(message) for message in trajectory.messages]
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(f"{message['role']}: {_indented(str(message['content']))}" for message in messages)

    def _without_special_tokens(self, value: Any) -> Any:
        match value:
            case str():
                return self._special.sub(" ", value)
            case list():
                return [self._without_special_tokens(each) for each in value]
            case dict():
                return {key: self._without_special_tokens(each) for key, each in value.items()}
        return value

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = (str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        tokens = sorted({*self._tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
