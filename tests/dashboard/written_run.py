"""A run's folder as the real writers leave it, without a model: each test decides what the episodes say."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from roll_flash.config.tree import load_config
from roll_flash.models.tiny import vocabulary
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.run.journal import Journal
from roll_flash.run.run_dir import RunDir
from roll_flash.types import EpisodeFailure, Message, Task, Trajectory, Turn

BEGIN_S = 1_760_000_000.0
STEP_S = 10.0
TOKENS = vocabulary()
IDS = {token: number for number, token in enumerate(TOKENS)}
REPLICAS = 4


def ids_of(text: str) -> list[int]:
    return [IDS.get(character, IDS["<|unknown|>"]) for character in text]


def trajectory(
    episode_id: str,
    group_id: str,
    actions: Sequence[str],
    *,
    prompt: str = "What is 6 * 7?",
    observation: str = "go on",
    reward: float = 1.0,
    version: int = 0,
    started_s: float = BEGIN_S,
    **changes: Any,
) -> Trajectory:
    """An episode with these answers of the model; each letter is a token."""
    messages: list[Message] = [{"role": "user", "content": prompt}]
    tokens, mask, turns = ids_of(prompt), [0] * len(prompt), []
    for number, action in enumerate(actions):
        is_last = number == len(actions) - 1
        start = len(tokens)
        tokens += ids_of(action)
        mask += [1] * len(action)
        said = "" if is_last else observation
        begin_s = started_s + 0.2 + number * 1.5
        turns.append(
            Turn(
                start,
                len(tokens),
                action,
                said,
                reward if is_last else 0.0,
                "stop",
                1.0,
                0.4,
                start,
                len(action),
                begin_s,
                "server-0",
            )
        )
        messages.append({"role": "assistant", "content": action})
        if not is_last:
            messages.append({"role": "user", "content": observation})
            tokens += ids_of(observation[:200])
            mask += [0] * len(observation[:200])
    shape = np.array(mask, np.bool_)
    noise = np.abs(np.sin(np.arange(len(tokens)))) * 3
    return replace(
        Trajectory(
            episode_id=episode_id,
            group_id=group_id,
            task=Task(f"Sum-v0:{group_id[-2:]}", "Sum-v0", 7, {"digits": 2}),
            token_ids=np.array(tokens, np.int32),
            policy_mask=shape,
            logprobs=np.where(shape, -noise, 0).astype(np.float32),
            versions=np.where(shape, version, -1).astype(np.int32),
            turns=tuple(turns),
            messages=tuple(messages),
            reward=reward,
            success=reward > 0.5,
            end="terminated",
            prompt_length=len(prompt),
            started_s=started_s,
            finished_s=started_s + 0.5 + 1.5 * len(actions),
            info={
                "rewards": {"correct": reward, "format": 0.5},
                "tools": {"shell": {"calls": 2, "errors": 1, "seconds": 0.3}},
            },
        ),
        **changes,
    )


class RecordedRun:
    """`runs/NAME`, written step by step; `close` ends it as a run that was stopped."""

    def __init__(self, runs: Path, name: str = "recorded", **settings: Any) -> None:
        tree = {"name": name, "runs": str(runs), "steps": 20, "model": {"path": "tiny"}, "envs": [{"id": "Sum-v0"}]}
        self.config = load_config({**tree, **settings})
        self.run_dir = RunDir.create(self.config, resume=False)
        self.folder = self.run_dir.folder
        self._metrics = MetricsLog(self.folder, tensorboard=False)
        self.episodes = EpisodesWriter(self.run_dir.episodes)
        self._journal = Journal(self.run_dir.journal)
        self._journal.begin(0)
        self.steps = 0

    def checkpoint(self) -> None:
        """Write a checkpoint of which only the tokenizer is looked at."""
        with self.run_dir.writing_checkpoint(max(1, self.steps)) as folder:
            (folder / "hf").mkdir()
            tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[]))
            tokenizer.decoder = decoders.Fuse()
            tokenizer.save(str(folder / "hf" / "tokenizer.json"))

    def step(self, episodes: Sequence[Trajectory] = (), *, stages_add: float = 0.0, **metrics: float) -> None:
        """Write what a step does: its episodes, what became of them, the learner's work, its metrics. `stages_add`:
        what stages add to each reward."""
        step, begin_s = self.steps, BEGIN_S + self.steps * STEP_S
        given = list(episodes) or self.group(f"g{step:08d}", begin_s, step)
        groups: dict[str, list[list[Any]]] = {}
        for episode in given:
            self.episodes.write(step, episode)
            groups.setdefault(episode.group_id, []).append([episode.episode_id, episode.reward + stages_add])
        self.episodes.sync()
        batches = [[*map(list, groups.items())]]
        event = {"event": "trained", "version": step + 1, "batches": batches, "without_rows": []}
        self._journal.write({**event, "metrics": metrics})
        self._journal.sync()
        work = [("accumulate", begin_s + 5, begin_s + 8, 400), ("update", begin_s + 8, begin_s + 9, 0)]
        publication = {"version": step, "begin_s": begin_s + 1, "end_s": begin_s + 2.5}
        span = {"step": step + 1, "started_s": begin_s, "ended_s": begin_s + STEP_S, "learner": work}
        judged = [("judge", begin_s - 1, begin_s + 2, 4)] if step else []
        self.run_dir.log_timeline({**span, "publication": publication if step else None, "stages": judged})
        self.steps += 1
        rewards = [episode.reward for episode in given]
        figures = {
            "reward": sum(rewards) / len(rewards),
            "success": sum(reward > 0.5 for reward in rewards) / len(rewards),
            "staleness_mean": 0.5,
            "staleness_max": 1.0,
            "tokens_per_s": 900.0 + 10 * math.sin(step),
            "step_s": STEP_S,
            "kl_k3": 1e-4 * (1 + math.cos(step)),
            "idle/learner": 0.4,
            "idle/servers": 0.1,
        }
        self._metrics.log(self.steps, {**figures, **metrics})

    def group(self, group_id: str, begin_s: float, version: int) -> list[Trajectory]:
        """Replicas that agree in their first turn."""
        return [
            trajectory(
                f"{group_id}-r{number}",
                group_id,
                ["Let me compute 6 * 7.", f"The answer is {42 if number % 2 else 30 + number}."],
                reward=float(number % 2),
                version=max(0, version - number % 2),
                started_s=begin_s + 0.3 * number,
            )
            for number in range(REPLICAS)
        ]

    def fail(self, cause: Any, message: str, episode_id: str = "failed-1", **changes: Any) -> None:
        task = Task("Sum-v0:99", "Sum-v0", 99, {})
        failure = EpisodeFailure(episode_id, "g99999999", task, cause, message, 1, 0, 10, 5, BEGIN_S, BEGIN_S + 3)
        self.episodes.write(self.steps, replace(failure, **changes))

    def evaluation(self, step: int) -> Path:
        """Write an evaluation after this step, of the episodes before it."""
        folder = self.folder / "eval" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text('{"tasks": 4}')
        shutil.copy(self.folder / f"episodes/step_{step - 1:06d}.jsonl", folder / "episodes.jsonl")
        (folder / "results.json").write_text('{"success": {"value": 0.5, "low": 0.2, "high": 0.8, "count": 4}}')
        return folder

    def close(self) -> None:
        self._metrics.close()
        self.episodes.close()
        self._journal.close()
        self.run_dir.close()
