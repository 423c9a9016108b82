"""Demonstrations that a model learns to imitate: the best episodes of an earlier run, with exactly the sampled tokens,
or the rows of a data set, whose assistant turns are tokenised as the chat template shows them.

Rows are read and tokenised when they are drawn, so that a million of them need little memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roll_flash.chat.model_text import THINK_CLOSE, THINK_OPEN
from roll_flash.chat.rendered_conversation import open_conversation
from roll_flash.chat.templates import Tools, chat_template_of
from roll_flash.chat.tokenizer import load_checked_tokenizer, load_tokenizer
from roll_flash.checked_files import as_a_run_writes
from roll_flash.config.sections.data import DataConfig
from roll_flash.config.sections.learner import WarmStartConfig
from roll_flash.config.tree import ModelConfig
from roll_flash.engines.inference import Generation
from roll_flash.envs.datasets.columns import demonstration_columns, demonstration_of
from roll_flash.envs.datasets.formats import open_rows
from roll_flash.envs.datasets.rows import Rows
from roll_flash.envs.tools.tool_chat import ToolChat, calls_as_text
from roll_flash.errors import ConfigError, ModelError
from roll_flash.monitor.episode_files.steps import step_files
from roll_flash.monitor.episodes import read_episodes
from roll_flash.terminal import say
from roll_flash.types import Message, Task, Trajectory

TRIED_AT_START = 4000
"""Number of rows that are tokenised when a run starts, in a few seconds; of the others only the form is checked."""


class Demonstrations(Protocol):
    """Samples by the number of their episode or row. A row that is too long has none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sequence[Trajectory]: ...


def check_demonstrations(config: WarmStartConfig, model_folder: Path, model: ModelConfig) -> None:
    """Raises ConfigError for a missing source, for a key that it does not read, and for the first row that is no
    conversation to imitate; or if no row is short enough. Says how many are not. Reads no episode of a run."""
    if (episodes := _episodes_of(config)) is not None:
        if not step_files(episodes):
            raise ConfigError(f"warm_start.demonstrations: {episodes} has no episodes (step_*.jsonl)")
        if given := {"columns", "subset", "split"} & config.model_dump(exclude_defaults=True).keys():
            raise ConfigError(f"warm_start.{min(given)} is for rows, and {episodes} has episodes of a run; remove it")
        return
    if config.min_reward is not None:
        raise ConfigError(
            f"warm_start.min_reward is for episodes of a run; {config.demonstrations} has rows, all of which are "
            "imitated: leave out those that are worth too little, and remove it"
        )
    demonstrations = _open_rows(config, model_folder, model)
    tried, too_long = 0, 0
    for index in range(len(demonstrations)):
        if index < TRIED_AT_START or too_long == tried:
            tried, too_long = tried + 1, too_long + (not demonstrations[index])
        else:
            demonstrations.conversation(index)
    if too_long == tried:
        raise _nothing(config, model)
    if too_long:
        say(
            f"warm_start.demonstrations: {too_long:,} of {tried:,} rows have more than model.max_length="
            f"{model.max_length} tokens and are not imitated",
            error=True,
        )


def open_demonstrations(config: WarmStartConfig, model_folder: Path, model: ModelConfig) -> Demonstrations:
    """Return demonstrations of at most `model.max_length` tokens; those of a run best first. Raises ConfigError if a
    run has none."""
    if (episodes := _episodes_of(config)) is None:
        return _open_rows(config, model_folder, model)
    tokenizer = load_tokenizer(model_folder, model.chat_template_kwargs)
    found = _from_episodes(episodes, config, tokenizer, model.max_length)
    if not found:
        raise _nothing(config, model)
    return found


def _episodes_of(config: WarmStartConfig) -> Path | None:
    """Return the folder of a run's episodes; None if the source is a data set."""
    folder = Path(config.demonstrations)
    if (folder / "episodes").is_dir():
        return folder / "episodes"
    return folder if step_files(folder) else None


def _nothing(config: WarmStartConfig, model: ModelConfig) -> ConfigError:
    wanted = "" if config.min_reward is None else f" with a reward of at least {config.min_reward:g}"
    return ConfigError(
        f"warm_start.demonstrations: {config.demonstrations} holds nothing to imitate{wanted} within "
        f"{model.max_length} tokens (model.max_length)"
    )


def _open_rows(config: WarmStartConfig, model_folder: Path, model: ModelConfig) -> RowDemonstrations:
    try:
        data = DataConfig(path=config.demonstrations, subset=config.subset, split=config.split)
        rows = open_rows(data, config.demonstrations, config.split, demonstration_columns(config.columns))
    except ConfigError as error:
        raise ConfigError(f"warm_start.demonstrations: {error}") from None
    tokenizer = load_checked_tokenizer(model_folder, model.chat_template_kwargs)
    return RowDemonstrations(rows, config.columns, tokenizer, model)


class RowDemonstrations:
    """Conversations in the rows of a data set."""

    def __init__(self, rows: Rows, columns: Mapping[str, str], tokenizer: Any, model: ModelConfig) -> None:
        self._rows = rows
        self._columns = columns
        self._tokenizer = tokenizer
        self._template = chat_template_of(tokenizer)
        self._model = model

    def __len__(self) -> int:
        return len(self._rows)

    def conversation(self, index: int) -> tuple[list[Message], int, Tools]:
        """As `demonstration_of`, of a row. Raises ConfigError, with the line, for what is none."""
        try:
            return demonstration_of(self._rows[index], self._columns, self._rows.place(index))
        except ConfigError as error:
            raise ConfigError(f"warm_start.demonstrations: {error}") from None

    def __getitem__(self, index: int) -> list[Trajectory]:
        place = self._rows.place(index)
        conversation = self.conversation(index)
        try:
            samples = self._imitated(place, *conversation)
        except (ValueError, KeyError, TypeError, ModelError) as error:
            raise ConfigError(f"warm_start.demonstrations: {place}: {error}") from None
        return samples if all(len(one.token_ids) <= self._model.max_length for one in samples) else []

    def _imitated(self, name: str, messages: Sequence[Message], first: int, tools: Tools) -> list[Trajectory]:
        """Tokenise the conversation as in a rollout; assistant turns from `first` on, with their end token, are the
        policy tokens."""
        chat = ToolChat(tools, self._template if tools else None)
        opening = chat.opening(messages[:first])
        conversation = open_conversation(self._model.thinking, self._tokenizer, opening, chat.native)
        between: list[Message] = []
        for message in messages[first:]:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if between:
                conversation.add_observation(chat.results(between))
                between = []
            said = self._template.tokens_of_turn(self._said(message, chat.native))
            conversation.add_generation(_as_if_sampled([*said, self._end_of_turn]))
        return [_demonstration(name, token_ids, mask, 1.0) for token_ids, mask, *_ in conversation.samples()]

    @property
    def _end_of_turn(self) -> int:
        end = self._template.end_of_turn
        return int(self._tokenizer.eos_token_id if end is None else end)

    def _said(self, message: Message, tools: Tools) -> str:
        """Return what the model would write for a message, after the header of its turn."""
        text, calls = str(message.get("content") or ""), message.get("tool_calls") or ()
        if thinking := message.get("reasoning_content"):
            text = f"{THINK_OPEN}\n{thinking}\n{THINK_CLOSE}\n\n{text}"
        if calls:
            text = (text + self._template.text_of_calls(calls, tools)).lstrip() if tools else calls_as_text(text, calls)
        opened = self._template.opened_thinking
        if opened and text.lstrip().startswith(THINK_OPEN):
            text = text.lstrip().removeprefix(THINK_OPEN)
            return text.removeprefix("\n") if opened.endswith("\n") else text
        return text if not opened or THINK_CLOSE in text else f"\n{THINK_CLOSE}\n\n{text}"


def _from_episodes(
    folder: Path, config: WarmStartConfig, tokenizer: Any, max_length: int
) -> list[Sequence[Trajectory]]:
    with as_a_run_writes(folder):
        return _best_of(read_episodes(folder), folder, config, tokenizer, max_length)


def _best_of(
    records: Sequence[Mapping[str, Any]], folder: Path, config: WarmStartConfig, tokenizer: Any, max_length: int
) -> list[Sequence[Trajectory]]:
    records = [record for record in records if record["kind"] == "trajectory"]
    floor = -np.inf if config.min_reward is None else config.min_reward
    rewarded = [record for record in records if record["reward"] is not None and record["reward"] >= floor]
    usable = [record for record in rewarded if all(_is_usable(one, max_length) for one in _samples(record))]
    best = sorted(usable, key=lambda record: -record["reward"])[: config.best]
    return [_trajectories_of(record, folder, tokenizer) for record in best]


def _samples(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [record, *record.get("branches", ())]


def _is_usable(sample: Mapping[str, Any], max_length: int) -> bool:
    return len(sample["token_ids"]) <= max_length and any(sample["policy_mask"])


def _trajectories_of(record: Mapping[str, Any], folder: Path, tokenizer: Any) -> list[Trajectory]:
    """Return the episode's samples with their sampled tokens. Raises ConfigError if another tokenizer made them."""
    opened = chat_template_of(tokenizer).opened_thinking
    for turn in record["turns"]:
        sampled = record["token_ids"][turn["start"] : turn["end"]]
        text = tokenizer.decode(sampled, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if sampled and turn["action"] not in (text, opened + text):
            raise ConfigError(
                f"warm_start.demonstrations: episode {record['episode_id']} in {folder} was played with another "
                "tokenizer than this model's; give its conversations as a .jsonl file of messages"
            )
    return [
        _demonstration(
            record["episode_id"],
            np.asarray(sample["token_ids"], np.int32),
            np.asarray(sample["policy_mask"], np.bool_),
            record["reward"],
        )
        for sample in _samples(record)
    ]


def _as_if_sampled(token_ids: Sequence[int]) -> Generation:
    number = len(token_ids)
    zeros = np.zeros(number, np.float32)
    return Generation(np.asarray(token_ids, np.int32), zeros, np.zeros(number, np.int32), "stop", "", 0.0)


def _demonstration(name: str, token_ids: Any, mask: Any, reward: float) -> Trajectory:
    return Trajectory(
        episode_id=name,
        group_id=name,
        task=Task(task_id=name, env_id="demonstration", seed=0),
        token_ids=token_ids,
        policy_mask=mask,
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(),
        messages=(),
        reward=reward,
        success=None,
        end="terminated",
        prompt_length=int(np.argmax(mask)),
        started_s=0.0,
        finished_s=0.0,
    )
