"""The stage of on-policy distillation: asks a teacher for the log-probability of each sampled token.

As soon as a trajectory is in the stream, its tokens go to the teacher as they were sampled. The column that the stage
writes is log pi_teacher - log mu of each policy token, where mu is the policy that sampled it: minus the one-sample
estimate of the reverse KL divergence (GKD, arXiv 2306.13649; Lu, "On-Policy Distillation", Thinking Machines, 2025).
The learner adds it to the advantage of the token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.chat.openai_client import EndpointRefusedError, OpenAIChatClient, api_key_from
from roll_flash.chat.prompt_logprobs import GENERATE_PATH, read_prompt_logprobs, score_request
from roll_flash.config.sections.distill import TEACHER, DistillConfig
from roll_flash.engines.inference import ClientSpec
from roll_flash.errors import InferenceError
from roll_flash.processes.background import call_in_thread
from roll_flash.stages.hints import hinted_tokens
from roll_flash.stages.same_tokenizer import check_endpoint
from roll_flash.stream import Consumer, Row, Stage, TrajectoryStream
from roll_flash.stream.blocks import fetch_trajectories
from roll_flash.stream.episodes import NO_LOGPROB, trained_mask
from roll_flash.types import MAX_TEACHER_LOG_RATIO, Branch, Trajectory

MAX_ATTEMPTS = 3
"""Attempts of one request at one server; the stage repeats a trajectory, at another server if there is one."""
Log = Callable[[dict[str, Any]], Any]


class TooLongError(Exception):
    """A sample does not fit into the teacher's context."""


class Teacher:
    """The teacher of a run. Belongs to one event loop."""

    def __init__(self, config: DistillConfig, tokenizer: Any) -> None:
        """`tokenizer`: that of the policy."""
        self.config = config
        self._tokenizer = tokenizer
        self.servers: Callable[[], ClientSpec] | None = None
        """Returns the servers that the run started, as they are now; None: the teacher is at its `base_url`."""
        self._max_length: int | None = None
        """Context of the teacher at its `base_url`; None: not known."""
        self._clients: dict[str, OpenAIChatClient] = {}
        self._in_flight: Counter[str] = Counter()

    async def check(self) -> None:
        """Check that an endpoint has the tokenizer of the policy. Raises ConfigError if not, InferenceError if it does
        not answer."""
        if self.config.teacher.base_url is not None:
            self._max_length = await check_endpoint(self.config.teacher, self._tokenizer)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def stage(self, stream: TrajectoryStream, log: Log) -> Stage:
        """Return the stage, not started; `log` gets the estimate of each trajectory, and every failure."""
        return Stage(
            stream,
            Consumer(TEACHER),
            partial(self._score, stream, log),
            concurrency=self.config.workers,
            timeout_s=self.config.timeout_s,
            retries=self.config.retries,
            max_failures_in_a_row=self.config.max_failures_in_a_row,
            on_error=lambda rows, error: log({"stage": TEACHER, "episode_id": rows[0].row_id, "error": error}),
        )

    async def _score(self, stream: TrajectoryStream, log: Log, rows: Sequence[Row]) -> list[dict[str, Any]]:
        (row,) = rows
        (trajectory,) = await call_in_thread(lambda: fetch_trajectories([row.data.data]))
        try:
            found = np.concatenate([await self._of_sample(sample, trajectory) for sample in trajectory.samples])
        except TooLongError as error:  # no further attempt helps
            log({"stage": TEACHER, "episode_id": row.row_id, "error": str(error)})
            stream.drop([row], "teacher_too_long")
            return [{}]
        tokens = sum(int(trained_mask(sample).sum()) for sample in trajectory.samples)  # the others have 0
        log({"stage": TEACHER, "episode_id": row.row_id, "reverse_kl": -float(found.sum()) / max(1, tokens)})
        return [{TEACHER: found}]

    async def _of_sample(self, sample: Trajectory | Branch, trajectory: Trajectory) -> NDArray[np.float32]:
        """Return log pi_teacher - log mu of the policy tokens, within +-MAX_TEACHER_LOG_RATIO; 0 for a token without a
        log-probability from the sampler, and for those behind the teacher's context: without its sample, a model that
        writes until its context is full would lose no reward. Raises TooLongError if that has none of the tokens;
        RunError without a hint; InferenceError."""
        sampled = np.flatnonzero(sample.policy_mask)
        if not sampled.size or sampled[0] == 0:  # the learner drops it, with its reason
            return np.zeros(sampled.size, np.float32)
        most = self._max_length if self.servers is None else self.servers().max_model_len
        token_ids, moved = sample.token_ids.tolist(), 0
        if (hint := self.config.hint) is not None:
            room = most or len(token_ids) + hint.max_tokens
            shown = partial(hinted_tokens, sample, trajectory, hint, self._tokenizer, room)
            token_ids, moved = await call_in_thread(shown)
        length = int(sampled[-1]) + 1 + moved
        seen = length if most is None else min(length, most - 1)  # it must have room to sample a token
        known = int(np.searchsorted(sampled, seen - moved))
        if not known:
            raise TooLongError(f"the first sampled token, and one more, do not fit into the teacher's {most}")
        teacher = (await self._ask(token_ids[:seen]))[sampled[:known] + moved - 1].astype(np.float64)
        own = sample.logprobs[sampled[:known]]
        ratios = np.zeros(sampled.size)
        ratios[:known] = np.where(own > NO_LOGPROB, teacher - own, 0.0)
        return np.clip(ratios, -MAX_TEACHER_LOG_RATIO, MAX_TEACHER_LOG_RATIO).astype(np.float32)

    async def _ask(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Return the log-probabilities [T - 1] of the tokens after the first."""
        teacher = self.config.teacher
        if self.servers is None:
            url, path, key = teacher.base_url or "", "/completions", api_key_from(teacher.api_key_env)
            body: dict[str, Any] = {"model": teacher.served_name, "prompt": token_ids}
            body |= {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        else:
            spec, path, body = self.servers(), GENERATE_PATH, score_request(token_ids)
            url, key = min(spec.endpoints, key=lambda endpoint: self._in_flight[endpoint]), spec.key
        if (client := self._clients.get(url)) is None:
            client = OpenAIChatClient(url, teacher.served_name or "", key, path=path, max_attempts=MAX_ATTEMPTS)
            self._clients[url] = client
        self._in_flight[url] += 1
        try:
            answer = await client.complete(body, timeout_s=self.config.timeout_s)
            return read_prompt_logprobs(answer if path == GENERATE_PATH else answer["choices"][0], token_ids)
        except EndpointRefusedError as error:
            if error.is_too_long:
                raise TooLongError(str(error)) from None
            raise
        except (LookupError, TypeError, ValueError) as error:
            raise InferenceError(f"{client.url}: {str(error)[:300]}; a teacher must be a vLLM server") from None
        finally:
            self._in_flight[url] -= 1
