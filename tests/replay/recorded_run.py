"""Run folders whose episodes were played here, by a script in place of a model: real environments, tokens and log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.tree import load_config
from roll_flash.engines.inference import Generation
from roll_flash.envs.hosting.environments import AsyncEnvironment, EnvironmentMaker
from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter, Outcome, episode_record
from roll_flash.monitor.json_lines import encode
from roll_flash.processes.background import DaemonThreads
from roll_flash.rollout.episodes.conversation import TokenPolicy
from roll_flash.rollout.episodes.episode import Deadlines, Progress, run_episode
from roll_flash.rollout.turns import EpisodeTurns, SentTurn
from roll_flash.run.run_dir import RunDir
from roll_flash.sandboxes import SandboxPool, SandboxSpec
from roll_flash.types import EpisodeSpec, SamplingParams, Task

PATIENT = Deadlines(60.0, 60.0, 120.0)
VERSION = 3


class Says:
    """A stand-in for a server: says the given texts, each with an end of turn."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self.prompts: list[list[int]] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        self.prompts.append(list(token_ids))
        tokens = [*self._tokenizer.encode(self._texts.pop(0)), self._tokenizer.eos_token_id]
        count = len(tokens)
        logprobs = np.full(count, -0.5, np.float32)
        return Generation(np.array(tokens, np.int32), logprobs, np.full(count, VERSION, np.int32), "stop", "here", 0.1)


def spec_of(task: Task, episode_id: str = "g00000001-r0", max_turns: int = 6) -> EpisodeSpec:
    return EpisodeSpec(episode_id, episode_id.rpartition("-r")[0], 0, task, SamplingParams(), max_turns)


def play(
    spec: EpisodeSpec,
    texts: Sequence[str],
    *,
    tokenizer: Any = None,
    provider: str = "local",
    max_length: int = 4000,
    thinking: Any = "keep",
) -> tuple[Outcome, Says, list[SentTurn]]:
    """Play an episode as a worker does; return its outcome, what the stand-in was asked, and its finished turns."""
    tokenizer = tokenizer or load_tokenizer(resolve_model("tiny"))
    client: Any = Says(tokenizer, texts)
    sent: list[SentTurn] = []
    turns = EpisodeTurns(spec, sent.append)
    policy = TokenPolicy(
        client,
        tokenizer,
        spec.sampling,
        episode_id=spec.episode_id,
        max_length=max_length,
        thinking=thinking,
        turns=turns,
    )
    outcome = asyncio.run(play_with(policy, spec, provider=provider, turns=turns))
    return outcome, client, sent


async def play_with(
    policy: Any, spec: EpisodeSpec, *, provider: str = "local", turns: EpisodeTurns | None = None
) -> Outcome:
    maker, leases = EnvironmentMaker(DaemonThreads()), []
    async with SandboxPool(provider=provider, size=0) as pool:

        async def open_env() -> AsyncEnvironment:
            env = await maker.open(spec.task)
            if env.sandbox_env is not None:
                leases.append(LazySandbox(pool, SandboxSpec()))
                env.sandbox_env.sandbox = leases[-1]
            return env

        try:
            return await run_episode(spec, open_env, policy, PATIENT, Progress(), turns=turns)
        finally:
            for lease in leases:
                await lease.close()


def record_of(outcome: Outcome) -> dict[str, Any]:
    """The record as a reader of the log gets it."""
    record: dict[str, Any] = json.loads(encode(episode_record(outcome)))
    return record


def write_run(runs: Path, outcomes: Sequence[Outcome], **tree: Any) -> Path:
    """Write the folder of a run that has ended, with these episodes in step 0."""
    config = load_config({"name": "recorded", "runs": str(runs), "model": {"path": "tiny"}, **tree})
    with RunDir.create(config, resume=False) as run, EpisodesWriter(run.episodes) as log:
        for outcome in outcomes:
            log.write(0, outcome)
    return run.folder
