"""Implements the LearnerEngine protocol in the driver with FSDP ranks in Ray actors.

The driver knows metadata alone and plans; ranks fetch the arrays of their share and pack them. Invariants: every rank
runs the same number of passes; the gradient of a step is that of the mean over all its policy tokens, independent of
their split over groups, rows and ranks; every call has a timeout; after a failure of any rank all ranks are killed and
every further call raises the reason, until `start` starts them again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray.exceptions
from numpy.typing import NDArray
from ray.actor import ActorHandle

from roll_flash.config.sections.distill import DistillConfig
from roll_flash.config.sections.learner import LearnerConfig, is_own
from roll_flash.config.user_code import load_function
from roll_flash.engines.inference import StagedWeights, WeightTransfer
from roll_flash.engines.learner import AdamSettings, NamedLoss, StepResult
from roll_flash.engines.places import Places, unless_lost
from roll_flash.errors import (
    CheckpointError,
    ConfigError,
    LearnerError,
    LearnerLostError,
    PlacementError,
    RollFlashError,
    first_line,
)
from roll_flash.learner.losses.entropy_control import EntropyControl
from roll_flash.learner.losses.records import RowRecord
from roll_flash.learner.losses.second_moment import limit_second_moment
from roll_flash.learner.losses.shaping import shape_rewards
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.learner.packing.sequences import (
    PlannedTrajectory,
    check_staleness,
    prepare_demonstrations,
    prepare_groups,
    row_parts,
    share_out,
    split_minibatches,
    text_sequence,
)
from roll_flash.learner.ranks.node_folders import NodeFolders
from roll_flash.learner.ranks.rank_actor import Forms, RankActor, UpdateRecord, rank_actor, rank_environment
from roll_flash.learner.ranks.step_totals import StepTotals
from roll_flash.learner.weights.channel import NcclChannel
from roll_flash.processes.background import start_background
from roll_flash.processes.deadlines import Idleness, LearnedDeadline
from roll_flash.run.checkpoints.folder import MANIFEST, read_manifest, write_in_background
from roll_flash.stream import finished_group
from roll_flash.types import FinishedGroup, Group, Trajectory

_CLOSE_TIMEOUT_S = 20.0
_START_FLOOR_S = 60.0
"""Minimum timeout in seconds of each call of a start; else ten times the longest start, at most `start_timeout_s`."""
_WATCH_EVERY_S = 1.0
_IDLE_S = 30.0
"""Seconds after which a call is lost for which no rank does anything: Ray loses an answer for which the driver has no
memory."""
_COMPUTES = frozenset(
    (
        "accumulate",
        "accumulate_demonstrations",
        "accumulate_kept",
        "accumulate_sequences",
        "begin_export",
        "begin_save",
        "divergences",
        "keep",
        "stage",
        "text_logprobs",
        "update",
    )
)
"""Calls that keep a rank busy as long as they last; others may wait for files, for servers or for other nodes."""
DECAY_SHARE = 0.2
"""Part of the steps in which `decay: wsd` lowers the learning rate."""
_LOG = logging.getLogger(__name__)


class FsdpLearner:
    """A learner with `config.ranks` ranks. Ray must be initialised; each rank is an actor at its place in the plan.

    `temperature` is the sampling temperature: log-probabilities are compared under the sampling distribution.
    """

    def __init__(
        self,
        model_folder: Path,
        config: LearnerConfig,
        *,
        async_ratio: float,
        seed: int = 0,
        temperature: float = 1.0,
        run: str = "run",
        transfer: WeightTransfer = "shm",
        max_length: int | None = None,
        steps: int | None = None,
        distill: DistillConfig | None = None,
    ) -> None:
        """`max_length`: most tokens of a trajectory, for what ranks try on a GPU at their start; None: not known.
        `steps`: those of the whole run, for a learning rate that decays. `distill`: how the terms of a teacher are
        weighted; None: there is no teacher."""
        self._folder = Path(model_folder)
        self._config = config
        self._async_ratio = async_ratio
        self._seed = seed
        self._temperature = temperature
        self._run = run
        self._transfer: WeightTransfer = transfer
        self._max_length = max_length
        self._steps = steps
        self._wanted_ranks = config.ranks
        """Ranks of the config; there are fewer after a restart without room for all."""
        self._places: Places | None = None
        self._ranks: list[ActorHandle[Any]] = []
        self._parts: list[str] = []
        """Name of the place of each rank."""
        self._watches: list[asyncio.Task[None]] = []
        self._start_deadline = LearnedDeadline(floor_s=_START_FLOOR_S, max_s=config.start_timeout_s)
        self._checked_s = 0.0
        """What `check_model` took, if `start` comes next."""
        self._node_folders: NodeFolders | None = None
        self._forms: Forms = {}
        self._left_busy = False
        """True if a rank may still run a call that was cancelled."""
        self._computing: set[asyncio.Future[list[Any]]] = set()
        """Calls of `_COMPUTES` without an answer. Others go on beside them, such as those about a checkpoint."""
        self._failure: str | None = "the learner has not been started"
        self._lost = asyncio.Event()
        self._fingerprint = self._frozen = ""
        self._row_tokens = config.micro_batch_tokens
        """Maximum tokens of a packed row, by which trajectories are shared out."""
        self._version = 0
        self._skipped_in_a_row = 0
        self._rules = _rules_of(config, distill)
        self._entropy = EntropyControl(config.entropy_bonus)
        self._begin_step()

    def _begin_step(self) -> None:
        self._totals = StepTotals()
        self._has_stepped = False
        self._waiting: list[FinishedGroup] = []
        self._kept: dict[str, int] = {}
        """Groups of the step, with the number of policy tokens that are trained."""

    @property
    def version(self) -> int:
        """Number of finished steps that changed the weights, supervised steps included."""
        return self._version

    @property
    def _folders(self) -> NodeFolders:
        self._check_usable()
        assert self._node_folders is not None, "start() comes first"
        return self._node_folders

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    async def check_model(self, places: Places | None = None) -> None:
        """See `LearnerEngine`: start only the first rank. No process keeps running after an error.

        Without `places` ranks reserve no CPU and Ray chooses their nodes.
        """
        began_s = time.monotonic()
        self._failure = None
        self._places = places
        self._parts = ["rank 0"]
        self._ranks = [self._new_rank(0, await self._reserved(0))]
        self._forms = await self._on_rank(0, "check_model", timeout_s=self._config.start_timeout_s)
        await self._repeat_warnings(self._config.start_timeout_s)
        self._checked_s = time.monotonic() - began_s

    async def start(self) -> None:
        """See `LearnerEngine`. No process keeps running after an error.

        When it starts again, a rank whose node is lost gets a place on another one. If no node has room for it, there
        are fewer ranks from then on, until the next start.
        """
        began_s = time.monotonic()
        if self._fingerprint:
            await self._begin_again()
        else:
            if not self._ranks:
                await self.check_model()
            further = range(1, self._config.ranks)
            self._ranks += [self._new_rank(rank, await self._reserved(rank)) for rank in further]
            self._parts += [f"rank {rank}" for rank in further]
        limit_s = self._start_deadline.limit_s()
        homes: list[Any] = [
            unless_lost(rank.call.remote("node_id"), self._places, part)
            for rank, part in zip(self._ranks, self._parts, strict=True)
        ]
        node_ids = await self._gather(homes, "node_id", limit_s)
        self._node_folders = NodeFolders(node_ids, ray.get_runtime_context().get_node_id())
        addresses = await self._on_all("node_address", timeout_s=limit_s)
        host = addresses[0] if len(set(addresses)) > 1 else None
        address = await self._on_rank(0, "open_store", host, timeout_s=limit_s)
        fingerprints = await self._on_all("start", address, self._forms, timeout_s=limit_s)
        self._fingerprint = fingerprints[0]
        await self._repeat_warnings(limit_s)
        self._frozen = ""
        if self._config.lora.rank:
            self._frozen = (await self._on_all("digest_of_frozen", timeout_s=limit_s))[0]
        if not all(await self._on_all("shares_prefixes", timeout_s=limit_s)):
            self._row_tokens = 1  # one row per sequence
        self._watches = [
            start_background(self._watch(rank, self._ranks), f"the watch over {part} of the learner")
            for rank, part in zip(self._ranks, self._parts, strict=True)
        ]
        if self._node_folders.are_all_here:
            idleness = Idleness(await self._on_all("process_id", timeout_s=limit_s))
            lost_calls = self._notice_lost_calls(idleness, self._ranks)
            self._watches.append(start_background(lost_calls, "the watch over the calls of the learner"))
        self._start_deadline.record(self._checked_s + time.monotonic() - began_s)
        self._checked_s = 0.0

    async def _repeat_warnings(self, timeout_s: float) -> None:
        """Log here what the first rank has warned of. The others compute on the same kind of device."""
        for line in (await self._gather([self._ranks[0].take_warnings.remote()], "take_warnings", timeout_s))[0]:
            _LOG.warning("learner: %s", line)

    async def _begin_again(self) -> None:
        """Create the ranks of a learner that had been started before, at version 0."""
        await self.close()
        self._lost.clear()
        self._failure, self._left_busy = None, False
        self._version, self._skipped_in_a_row = 0, 0
        self._entropy = EntropyControl(self._config.entropy_bonus)
        self._begin_step()
        places: dict[str, dict[str, Any]] = {}
        without: PlacementError | None = None
        for rank in range(self._wanted_ranks):
            try:
                places[f"rank {rank}"] = await self._reserved(rank)
            except PlacementError as error:
                without = error
        if without is not None and not places:
            self._kill(str(without))
            self._check_usable()
        if len(places) < self._wanted_ranks:
            _LOG.warning("the learner has %d of %d ranks: %s", len(places), self._wanted_ranks, without)
        size = self._config.shard_size
        keeps_size = size is not None and len(places) % size == 0
        self._config = self._config.model_copy(
            update={"ranks": len(places), "shard_size": size if keeps_size else None}
        )
        self._parts = list(places)
        self._ranks = [self._new_rank(rank, reserved) for rank, reserved in enumerate(places.values())]

    async def _watch(self, rank: ActorHandle[Any], ranks: list[ActorHandle[Any]]) -> None:
        """Notice the death of a rank of which nothing is asked: a call that waits in its queue fails at once."""
        try:
            while True:
                await rank.call.remote("node_id")
                await asyncio.sleep(_WATCH_EVERY_S)
        except ray.exceptions.RayError as error:
            if ranks is self._ranks:
                self._kill(self._death(error))

    async def _notice_lost_calls(self, idleness: Idleness, ranks: list[ActorHandle[Any]]) -> None:
        """Kill the ranks if a computing call has no answer although none of them does anything."""
        try:
            while True:
                await asyncio.sleep(_WATCH_EVERY_S)
                if not self._computing:
                    idleness.begin_again()
                elif (idle_s := idleness.idle_s()) > _IDLE_S and ranks is self._ranks:
                    self._kill(f"a call has no answer, and no rank has done anything for {idle_s:.0f} s")
                    for call in self._computing:
                        call.cancel()  # the death of the ranks may not end it either
        except psutil.NoSuchProcess:
            return  # `_watch` says so

    async def _reserved(self, rank: int) -> dict[str, Any]:
        """Return the options of a rank's actor. Raises PlacementError if no node has room for it."""
        if self._places is None:
            return {"num_cpus": 0, "num_gpus": _gpus_without_places(self._config)}
        return dict((await self._places.place(f"rank {rank}")).options)

    def _new_rank(self, rank: int, reserved: dict[str, Any]) -> ActorHandle[Any]:
        config = self._config
        actor = rank_actor(RankActor, self._transfer).options(
            **reserved,
            max_restarts=0,
            runtime_env={"env_vars": rank_environment(config.threads)},
        )
        made: ActorHandle[Any] = actor.remote(
            self._folder,
            config,
            rank=rank,
            seed=self._seed,
            temperature=self._temperature,
            run=self._run,
            transfer=self._transfer,
            max_length=self._max_length,
        )
        return made

    async def accumulate(self, groups: Sequence[Group | FinishedGroup]) -> None:
        """Run forward and backward passes on whole groups with the current weights.

        A group of whole trajectories is sent to the ranks by value. Raises LearnerError if a policy token is older than
        `version - async_ratio`, or if a rank fails; StreamError if trajectories are lost.
        """
        finished = [finished_group(group) for group in groups]
        check_staleness(finished, self._version, self._async_ratio)
        self._check_usable()
        if self._rules.needs_whole_batch:
            self._totals.add_waiting(len(finished))
            self._waiting.extend(finished)
        else:
            await self._take(finished)

    async def finish_step(self) -> StepResult:
        """Normalise and clip the gradient, then update. Raises LearnerError if nothing was accumulated.

        If loss or gradient is not finite, the step changes nothing and is reported as skipped. Raises LearnerError
        after more than `max_skipped_steps` skipped steps in a row.
        """
        self._check_usable()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            await self._take(waiting)
        rate = self._scheduled(self._config.learning_rate)
        normalizer = self._normalizer()
        if self._config.keeps_groups:
            updates = await self._update_in_parts(normalizer, rate)
        else:
            updates = [await self._update(normalizer, rate)]
        result = self._finish(normalizer, rate, updates)
        if self._config.adaptive_entropy.target is not None:
            result.metrics["entropy_bonus"] = self._entropy.bonus
            entropy = result.metrics.get("entropy", math.nan)
            await self._set_entropy(self._entropy.after(entropy, self._config.adaptive_entropy))
        return result

    async def abandon_step(self) -> None:
        """See `LearnerEngine`. A begun update increases the version: no checkpoint is mislabelled."""
        await self._on_all("abandon")
        self._version += self._has_stepped
        self._begin_step()

    async def sft_step(
        self, trajectories: Sequence[Trajectory], learning_rate: float | None = None, *, counts: bool = True
    ) -> StepResult:
        """See `LearnerEngine`. It uses the packing and optimizer of other steps. Only if it `counts` do `warmup_steps`
        and `decay` apply; if not, nothing is sampled meanwhile, and it takes all cores."""
        if not self._totals.empty:
            raise LearnerError("a supervised step cannot begin before finish_step ends the step that is under way")
        sequences = prepare_demonstrations(trajectories)
        self._totals.add_demonstrations(sequences)
        started = time.monotonic()
        shares = share_out([(len(each.token_ids), [each]) for each in sequences], self._config.ranks)
        if counts:
            records = await self._on_shares("accumulate_sequences", shares, loss=NamedLoss("supervised"))
        else:
            records = await self._on_shares("accumulate_demonstrations", shares)
        self._totals.add_rows(records)
        self._totals.forward_backward_s += time.monotonic() - started
        rate = self._config.learning_rate if learning_rate is None else learning_rate
        rate = self._scheduled(rate) if counts else rate
        normalizer = self._totals.policy_tokens
        updates = [await self._update(normalizer, rate, supervised=True)]
        return self._finish(normalizer, rate, updates, off_policy=False, counts=counts)

    async def logprobs_of(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See `LearnerEngine`; at temperature 1, with shared prefixes."""
        return await self.sequence_logprobs([text_sequence(text) for text in texts])

    async def sequence_logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities [T - 1] of all tokens but the first of each sequence, or of its `targets`."""
        places = share_out([(len(each.token_ids), [place]) for place, each in enumerate(sequences)], self._config.ranks)
        shares = [[sequences[place] for place in share] for share in places]
        found = await self._on_shares("text_logprobs", shares)
        of_place = dict(zip((place for share in places for place in share), found, strict=True))
        return [of_place[place][1:] for place in range(len(sequences))]

    async def add_gradient(
        self, sequences: Sequence[TrainSequence], loss: NamedLoss
    ) -> tuple[list[NDArray[np.float32]], float]:
        """Add the gradient of a loss, summed over the policy tokens of the sequences and not normalised, to that of the
        step; return their log-probabilities [policy tokens], which needs `log_logprobs`, and the loss."""
        named = [replace(each, name=("", place)) for place, each in enumerate(sequences)]
        self._totals.add_demonstrations(named)
        shares = share_out([(len(each.token_ids), [each]) for each in named], self._config.ranks)
        records: list[RowRecord] = await self._on_shares("accumulate_sequences", shares, loss=loss)
        self._totals.add_rows(records)
        found = {name: values for record in records for name, values in record.by_sample.items()}
        return [found["", place] for place in range(len(sequences))], sum(record.loss for record in records)

    async def adam_step(self, adam: AdamSettings) -> StepResult:
        """Update with what `add_gradient` has added since the last step; without any, momentum alone moves the
        weights."""
        updates = [await self._update(1.0, adam.learning_rate, adam=adam)]
        return self._finish(1.0, adam.learning_rate, updates, off_policy=False)

    async def stage_weights(self) -> StagedWeights:
        started = asyncio.get_running_loop().time()
        results = await self._on_all("stage", self._version)
        self._totals.staging_s += asyncio.get_running_loop().time() - started
        staged: StagedWeights = next(result for result in results if result is not None)
        if self._transfer == "ipc":
            from roll_flash.learner.weights.device import merge_handles  # imports torch

            staged = merge_handles([result for result in results if result is not None])
        if self._transfer != "nccl":
            return staged
        return replace(staged, channel=NcclChannel(self._ranks[0], self._gather, self._config.step_timeout_s))

    async def release_weights(self, weights: StagedWeights) -> None:
        """Raises LearnerError if the version is no longer staged."""
        await self._on_all("release", replace(weights, channel=None))

    async def begin_save(self, folder: Path) -> asyncio.Task[None]:
        """See `LearnerEngine`; atomic. Raises CheckpointError, here or from the task, if the folder exists or cannot be
        written, LearnerError inside a step; no files remain then."""
        if not self._totals.empty:
            raise LearnerError(f"{folder}: a checkpoint is written between steps, after finish_step")
        metadata = {"model": self._fingerprint, "version": self._version, "ranks": self._config.ranks}
        metadata["frozen"] = self._frozen
        if self._config.adaptive_entropy.target is not None:
            metadata |= {"entropy_weight": self._entropy.weight, "entropy_applies": self._entropy.applies}
        return await self._in_background("begin_save", folder, manifest=metadata)

    async def load(self, folder: Path) -> None:
        """Load a checkpoint, with any number of ranks.

        Raises CheckpointError; before any change if the checkpoint is missing, truncated or of another model.
        """
        self._check_usable()
        manifest = await asyncio.to_thread(read_manifest, folder, self._fingerprint, self._frozen)
        try:
            async with self._folders.for_reading(folder, MANIFEST) as folders:
                await self._on_each("load", folders)
        except CheckpointError as error:
            self._kill(f"its state is half loaded: {error}")
            raise
        self._version = manifest.version
        if self._config.adaptive_entropy.target is not None and manifest.entropy_weight is not None:
            await self._set_entropy(EntropyControl(manifest.entropy_weight, manifest.entropy_applies))
        self._begin_step()
        self._skipped_in_a_row = 0

    async def begin_export(self, folder: Path) -> asyncio.Task[None]:
        """See `LearnerEngine`; atomic, replaces an earlier model. Raises CheckpointError if the folder cannot be
        written, or exists without a model."""
        return await self._in_background("begin_export", folder, replaces=(folder / "config.json").is_file())

    async def _in_background(
        self, begin: str, folder: Path, *, replaces: bool = False, manifest: dict[str, Any] | None = None
    ) -> asyncio.Task[None]:
        async def begin_on_all(folders: Sequence[Path]) -> None:
            await self._on_each(begin, folders)

        async def has_written(folders: Sequence[Path]) -> bool:
            return all(await self._on_each("has_written", folders))

        return await write_in_background(
            folder,
            folders_of_ranks=self._folders.for_writing,
            begin=begin_on_all,
            has_written=has_written,
            timeout_s=self._config.step_timeout_s,
            replaces=replaces,
            manifest=manifest,
        )

    async def close(self) -> None:
        """Stop all ranks. Safe to call twice, and after a failure."""
        # A rank that is still starting, or runs a cancelled call, cannot answer yet: kill it immediately. The kernel
        # then frees its resources (weights in anonymous memory).
        if self._ranks and self._failure is None and self._fingerprint and not self._left_busy:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await asyncio.gather(*(rank.call.remote("close") for rank in self._ranks))
            except (TimeoutError, ray.exceptions.RayError) as error:
                self._failure = f"a rank did not close in order: {first_line(error)}"
        self._kill(self._failure or "the learner is closed")
        if self._node_folders is not None:
            self._node_folders.close()
            self._node_folders = None

    async def _take(self, groups: Sequence[FinishedGroup]) -> None:
        """Train on groups immediately, or let the ranks keep them, with proximal logprobs, until the step is full."""
        planned: list[PlannedTrajectory] = []
        for prepared in prepare_groups(await self._shaped(groups), self._version, self._rules):
            self._totals.add_group(prepared)
            self._kept[prepared.group_id] = sum(each.trained_tokens for each in prepared.planned)
            planned.extend(prepared.planned)
        if not planned:
            return
        started = time.monotonic()
        shares = share_out(row_parts(planned, self._row_tokens), self._config.ranks)
        if not self._config.keeps_groups:
            self._totals.add_rows(await self._on_shares("accumulate", shares))
            self._totals.forward_backward_s += time.monotonic() - started
        else:
            await self._on_shares("keep", shares)
            self._totals.prox_s += time.monotonic() - started

    async def _shaped(self, groups: Sequence[FinishedGroup]) -> Sequence[FinishedGroup]:
        """Return the groups with the rewards that advantages are computed of."""
        if not self._config.shapes_rewards:
            return groups
        divergences = await self._divergences(groups) if self._config.kl.in_reward else {}
        shaped = [shape_rewards(group, self._config, divergences) for group in groups]
        for _, rewards in shaped:
            self._totals.add_shaped(rewards)
        return [group for group, _ in shaped]

    async def _divergences(self, groups: Sequence[FinishedGroup]) -> dict[str, float]:
        """Return the divergence from the reference of each valid trajectory, by its episode's id; see
        `LearnerRank.divergences`."""
        rules = AdvantageConfig(keep_without_signal=True)
        planned = [each for group in prepare_groups(groups, self._version, rules) for each in group.planned]
        if not planned:
            return {}
        started = time.monotonic()
        shares = share_out(row_parts(planned, self._row_tokens), self._config.ranks)
        found = await self._on_shares("divergences", shares)
        self._totals.reference_s += time.monotonic() - started
        in_order = (each.episode_id for share in shares for each in share)
        return dict(zip(in_order, found, strict=True))

    async def _limit_second_moment(self, limit: float) -> None:
        """Leave out kept tokens of the step by the rule of M2PO, over all ranks together."""
        moment = limit_second_moment(np.concatenate(await self._on_all("kept_log_ratios")), limit)
        await self._on_all("limit_kept", moment.bound)
        self._totals.second_moment = moment

    async def _train_on_kept(self, group_ids: Sequence[str]) -> None:
        started = time.monotonic()
        if any(self._kept[name] for name in group_ids):
            self._totals.add_rows(await self._on_shares("accumulate_kept", [group_ids] * self._config.ranks))
        self._totals.forward_backward_s += time.monotonic() - started

    async def _on_shares(self, method: str, shares: Sequence[Sequence[Any]], **kwargs: Any) -> list[Any]:
        """Run `method` on each rank with its share; return all results in one list, in the order of the ranks."""
        results = await self._on_each(method, shares, **kwargs)
        return [result for found in results for result in found or ()]

    async def _update_in_parts(self, normalizer: float, rate: float) -> list[UpdateRecord]:
        if self._rules.has_critic:
            started = time.monotonic()
            await self._on_all("estimate_advantages")
            self._totals.prox_s += time.monotonic() - started
        if (limit := self._config.loss.second_moment_limit) is not None:
            await self._limit_second_moment(limit)
        critic_only = self._rules.has_critic and self._version < self._config.critic.warmup_steps
        count, updates = self._config.minibatches, []
        for part in split_minibatches(self._kept, count, (self._seed, self._version)):
            await self._train_on_kept(part)
            updates.append(await self._update(normalizer / count, rate, critic_only=critic_only))
        return updates

    async def forget_moments(self) -> None:
        """Let the optimizer begin again, with the weights as they are."""
        await self._on_all("forget_moments")

    async def _set_entropy(self, control: EntropyControl) -> None:
        self._entropy = control
        await self._on_all("set_entropy_bonus", control.bonus)

    async def _update(self, normalizer: float, rate: float, **which: Any) -> UpdateRecord:
        """`which`: see `LearnerRank.update`."""
        self._has_stepped = True
        updates: list[UpdateRecord] = await self._on_all(
            "update",
            normalizer,
            rate,
            skip=not self._totals.loss_is_finite(),
            **which,
        )
        self._count_skipped(updates[0].skipped)
        return replace(updates[0], seconds=max(update.seconds for update in updates))

    def _normalizer(self) -> int:
        normalizer = self._totals.normalizer(self._config.loss_normalization)
        if normalizer == 0 and self._totals.was_filtered:
            return 1  # nothing but episodes that were cut: a step without gradient, as one without signal
        if normalizer == 0:
            reason = f"there is nothing to step on: {self._totals.describe()}"
            self._begin_step()
            raise LearnerError(reason)
        return normalizer

    def _scheduled(self, rate: float) -> float:
        """Return the learning rate of this step: `rate` while nothing rises or falls."""
        config, done = self._config, self._version
        if done < config.warmup_steps:
            return rate * (done + 1) / config.warmup_steps
        if config.decay == "none" or self._steps is None:
            return rate
        part = min(1.0, (done - config.warmup_steps) / max(1, self._steps - config.warmup_steps))
        match config.decay:
            case "linear":
                height = 1 - part
            case "cosine":
                height = (1 + math.cos(math.pi * part)) / 2
            case "wsd":
                height = min(1.0, (1 - part) / DECAY_SHARE)
        return config.final_learning_rate + (rate - config.final_learning_rate) * height

    def _finish(
        self,
        normalizer: float,
        rate: float,
        updates: list[UpdateRecord],
        *,
        off_policy: bool = True,
        counts: bool = True,
    ) -> StepResult:
        totals, began = self._totals, self._version
        self._begin_step()
        applied = [update for update in updates if not update.skipped]
        if applied and counts:
            self._version += 1
        metrics = totals.metrics(normalizer, began if off_policy else None) | {
            "learning_rate": rate,
            "skipped": float(len(updates) - len(applied)),
            "optimizer_steps": float(len(applied)),
            "grad_norm": max(update.grad_norm for update in updates),
            "optimizer_s": sum(update.seconds for update in updates),
        }
        value_norms = [update.value_grad_norm for update in updates if update.value_grad_norm is not None]
        if value_norms:
            metrics["value_grad_norm"] = max(value_norms)
        return StepResult(self._version, totals.policy_tokens, not applied, metrics, totals.logprobs())

    def _count_skipped(self, skipped: bool) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row > self._config.max_skipped_steps:
            raise LearnerError(
                f"{self._skipped_in_a_row} steps in a row had a loss or gradient that is not finite and were "
                "skipped; lower learner.learning_rate, or look at rewards and log-probabilities of the last episodes"
            )

    async def _on_all(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """`timeout_s`: None is `learner.step_timeout_s`."""
        self._check_usable()
        calls = [rank.call.remote(method, *args, **kwargs) for rank in self._ranks]
        return await self._gather(calls, method, timeout_s or self._config.step_timeout_s)

    async def _on_each(self, method: str, arguments: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Call `method` on each rank with an argument of its own."""
        self._check_usable()
        calls = [rank.call.remote(method, each, **kwargs) for rank, each in zip(self._ranks, arguments, strict=True)]
        return await self._gather(calls, method, self._config.step_timeout_s)

    async def _on_rank(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        self._check_usable()
        (result,) = await self._gather([self._ranks[rank].call.remote(method, *args)], method, timeout_s)
        return result

    async def _gather(self, calls: list[Any], method: str, timeout_s: float) -> list[Any]:
        """Return the results of all ranks, or raise one error; after a failure all remaining ranks are killed."""
        ranks = self._ranks
        call = asyncio.gather(*calls)
        if method in _COMPUTES:
            self._computing.add(call)
        try:
            async with asyncio.timeout(timeout_s):  # asyncio.wait_for may lose a cancellation before Python 3.12
                results = list(await call)
            self._left_busy = False
            return results
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if ranks is self._ranks or task is None or task.cancelling():
                self._left_busy = True
                raise
            why = "its answer is lost"
        except TimeoutError:
            why = f"{method} took longer than {timeout_s:g} s; a rank hangs, or the time-out is too short"
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RollFlashError):
                if method in ("check_model", "start"):
                    self._kill(str(cause))
                raise cause from None
            why = f"{method} failed on a rank: {type(cause).__name__}: {first_line(cause)}"
        except ray.exceptions.RayError as error:
            why = self._death(error, method)
        except PlacementError as error:
            why = str(error)
        finally:
            self._computing.discard(call)
        if ranks is self._ranks:  # else they were killed meanwhile, and perhaps others started
            self._kill(why)
        raise LearnerLostError(self._failure or why)

    def _death(self, error: ray.exceptions.RayError, method: str = "") -> str:
        """Say which rank died."""
        dead = getattr(error, "actor_id", None)
        names = (f"learner rank {n}" for n, rank in enumerate(self._ranks) if rank._actor_id.hex() == dead)
        during = f" during {method}" if method else ""
        return f"{next(names, 'a learner rank')} died{during} ({first_line(error)})"

    def raise_if_lost(self) -> None:
        if self._failure is not None:
            raise LearnerLostError(self._failure)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LearnerLostError(f"the learner cannot be used: {self._failure}")

    def _kill(self, reason: str) -> None:
        self._failure = self._failure or reason
        for task in self._watches:
            task.cancel()
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks, self._watches = [], []
        self._lost.set()


def _rules_of(config: LearnerConfig, distill: DistillConfig | None) -> AdvantageConfig:
    """Return the rules of the config; groups without a signal are kept also for a loss of the user that has a gradient
    where advantages are 0."""
    rules = AdvantageConfig.of(config, distill)
    if not is_own(config.loss.name):
        return rules
    from roll_flash.learner.losses.own import learns_without_signal  # imports torch

    learns = learns_without_signal(load_function(config.loss.name, "learner.loss.name"), **config.loss.params)
    return replace(rules, keep_without_signal=rules.keep_without_signal or learns)


def _gpus_without_places(config: LearnerConfig) -> int:
    """Return the GPUs of each rank. Raises ConfigError if there are fewer than ranks, for which Ray would wait."""
    there = ray.cluster_resources().get("GPU", 0)
    if config.device == "cpu" or (config.device == "auto" and not there):
        return 0
    if there < config.ranks:
        raise ConfigError(f"learner.ranks={config.ranks} need a GPU each, and Ray has {there:g}; lower learner.ranks")
    return 1
