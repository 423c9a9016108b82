"""Takes supervised steps on demonstrations before reinforcement learning begins, with the same learner.

Demonstrations are the best episodes of an earlier run, with exactly the sampled tokens, or conversations in a JSON
lines file, `{"messages": [{"role": ..., "content": ...}, ...]}`; the model learns to imitate the assistant's turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_flash.chat.templates import Conversation
from roll_flash.config.learner import WarmStartConfig
from roll_flash.engines.inference import Generation
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import ConfigError, ModelError
from roll_flash.monitor.episodes import read_episodes
from roll_flash.processes.background import call_in_thread
from roll_flash.types import Message, Task, Trajectory


async def warm_start(
    learner: LearnerEngine,
    config: WarmStartConfig,
    *,
    model_folder: Path,
    max_length: int,
    seed: int,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Take `config.steps` supervised steps without changing the weight version. Returns metrics `warm_start/...`.

    Raises ConfigError if there are no demonstrations, LearnerError if the learner fails.
    """
    demonstrations = await call_in_thread(lambda: load_demonstrations(config, model_folder, max_length))
    random = np.random.default_rng(seed)
    order: list[int] = []
    losses: list[float] = []
    for step in range(config.steps):
        while len(order) < config.batch_size:
            order.extend(random.permutation(len(demonstrations)).tolist())
        batch, order = [demonstrations[index] for index in order[: config.batch_size]], order[config.batch_size :]
        result = await learner.sft_step(batch, config.learning_rate, counts=False)
        losses.append(result.metrics["loss"])
        report(f"warm start: step {step + 1} of {config.steps}, loss {losses[-1]:.3f}")
    return {
        "warm_start/demonstrations": float(len(demonstrations)),
        "warm_start/first_loss": losses[0],
        "warm_start/last_loss": losses[-1],
    }


def check_demonstrations(config: WarmStartConfig) -> None:
    """Raises ConfigError if the path does not exist; reads no demonstration."""
    source = Path(config.demonstrations)
    if not source.is_dir() and not source.is_file():
        raise ConfigError(f"warm_start.demonstrations: {source} is neither a folder nor a file")


def load_demonstrations(config: WarmStartConfig, model_folder: Path, max_length: int) -> list[Trajectory]:
    """Return demonstrations of at most `max_length` tokens, best first. Raises ConfigError if there are none."""
    from transformers import AutoTokenizer

    check_demonstrations(config)
    source = Path(config.demonstrations)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if source.is_dir():
        fitting = _from_episodes(source, config, tokenizer, max_length)
    else:
        found = _from_messages(source, tokenizer)
        fitting = [trajectory for trajectory in found if len(trajectory.token_ids) <= max_length]
    if not fitting:
        wanted = "" if config.min_reward is None else f" with a reward of at least {config.min_reward:g}"
        raise ConfigError(
            f"warm_start.demonstrations: {source} holds nothing to imitate{wanted} within {max_length} tokens"
        )
    return fitting[: config.best]


def _from_episodes(folder: Path, config: WarmStartConfig, tokenizer: Any, max_length: int) -> list[Trajectory]:
    episodes = folder / "episodes" if (folder / "episodes").is_dir() else folder
    records = [record for record in read_episodes(episodes) if record["kind"] == "trajectory"]
    floor = -np.inf if config.min_reward is None else config.min_reward
    rewarded = [record for record in records if record["reward"] is not None and record["reward"] >= floor]
    usable = [r for r in rewarded if len(r["token_ids"]) <= max_length and any(r["policy_mask"])]
    best = sorted(usable, key=lambda record: -record["reward"])[: config.best]
    return [_trajectory_of(record, folder, tokenizer) for record in best]


def _trajectory_of(record: Mapping[str, Any], folder: Path, tokenizer: Any) -> Trajectory:
    """Return the episode with its sampled tokens. Raises ConfigError if another tokenizer produced them."""
    for turn in record["turns"]:
        sampled = record["token_ids"][turn["start"] : turn["end"]]
        text = tokenizer.decode(sampled, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text != turn["action"]:
            raise ConfigError(
                f"warm_start.demonstrations: episode {record['episode_id']} in {folder} was played with another "
                "tokenizer than this model's; give its conversations as a .jsonl file of messages"
            )
    mask = np.asarray(record["policy_mask"], np.bool_)
    return _demonstration(record["episode_id"], np.asarray(record["token_ids"], np.int32), mask, record["reward"])


def _from_messages(file: Path, tokenizer: Any) -> list[Trajectory]:
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            found.append(_imitate(f"{file.name}:{number}", messages, tokenizer))
        except (ValueError, KeyError, TypeError, ModelError) as error:
            raise ConfigError(f"warm_start.demonstrations: {file}, line {number}: {error}") from None
    return found


def _imitate(name: str, messages: Sequence[Message], tokenizer: Any) -> Trajectory:
    """Tokenize the conversation as in a rollout; assistant turns with their end token are the policy tokens."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if first == 0:
        raise ValueError("an assistant message must come after at least one other")
    conversation = Conversation(tokenizer, messages[:first])
    between: list[Message] = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            between.append(message)
            continue
        if between:
            conversation.add_observation(between)
            between = []
        sampled = tokenizer(message["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        conversation.add_generation(_as_if_sampled(sampled))
    token_ids, mask, _, _ = conversation.arrays()
    return _demonstration(name, token_ids, mask, 1.0)


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
