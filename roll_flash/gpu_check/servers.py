"""Checks of learner and servers together: start, parity, publication under load, a killed server, places on GPUs.

They start as in a training run (`system.open_models`), and weights are changed by real steps of the learner.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from roll_flash.cluster.plan import Plan
from roll_flash.config.tree import Config
from roll_flash.engines.inference import Generation, InferenceClient, InferenceEngine
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import PlacementError
from roll_flash.gpu_check.check import Bench, CheckFailedError, NotPossibleError, require
from roll_flash.gpu_check.training import learn, made_groups
from roll_flash.inference.client.token_client import open_client
from roll_flash.inference.open import check_engine
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.learner.open import open_learner
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.background import cancel_and_wait, first_failure
from roll_flash.processes.nvml import Driver, read_driver
from roll_flash.system.system import open_models
from roll_flash.types import SamplingParams
from roll_flash.weight_sync.parity import (
    MEAN_SHARE,
    Parity,
    Probe,
    check,
    compare,
    load_probe,
    parity_threshold,
)
from roll_flash.weight_sync.publication import Publication, Publisher

CHANGING = ("learner.learning_rate=0.001", "learner.warmup_steps=0", "learner.lora.publish=merged")
"""Steps that change log-probabilities far beyond the threshold of parity."""
CLIENTS = 8
NEW_TOKENS = 1024
REQUEST_S = 400.0
"""Timeout in seconds of one request, which may wait for the restart of a server."""
CHANGE_FACTOR = 2.0
"""Multiple of the largest mean difference that passes, by which a step must change log-probabilities: old weights would
then be seen."""
MAX_STEPS = 4
PAUSE_COPIES = 3.0
"""Pause of a publication, in plain copies of its bytes, above which it is slow."""
PAUSE_FLOOR_S = 0.2
"""A shorter pause is never slow: it is spent on requests to the server."""


@dataclass(frozen=True, slots=True)
class Models:
    """A started learner, its servers (if any), and what publishes weights between them."""

    config: Config
    folder: Path
    learner: LearnerEngine
    plan: Plan
    probe: Probe
    threshold: float
    serving: InferenceEngine | None
    publishing: Publisher | None

    @property
    def engine(self) -> InferenceEngine:
        assert self.serving is not None, "the check needs servers"
        return self.serving

    @property
    def publisher(self) -> Publisher:
        assert self.publishing is not None, "the check needs servers"
        return self.publishing


@asynccontextmanager
async def models(
    bench: Bench, overrides: Sequence[str] = (), serves: bool = True, must_fit: bool = True
) -> AsyncIterator[Models]:
    """Start learner and servers as a run does. Unless it `must_fit`, a plan without room is not possible here; else it
    fails."""
    config = bench.settings.config_with(*CHANGING, *overrides)
    folder = resolve_model(config.model.path, config.model.revision)
    if serves:
        check_engine(config.inference, folder, trains=True)
    learner = open_learner(config, model_folder=folder)
    logs = bench.settings.output / "servers"
    logs.mkdir(exist_ok=True)
    began = time.monotonic()
    with first_failure() as failure:
        async with AsyncExitStack() as stack:
            opening = open_models(config, folder, learner, serves=serves, logs=logs, note=bench.note)
            try:
                engine, plan = await stack.enter_async_context(opening)
            except PlacementError as error:
                if must_fit:
                    raise
                raise NotPossibleError(str(error)) from None
            bench.measured(start_s=time.monotonic() - began, plan=plan.lines())
            probe = load_probe(folder, config.weights.parity_text, config.model.max_length)
            threshold = parity_threshold(config.weights, engine.dtype if engine else "float32")
            publisher = None
            if engine is not None:
                publisher = Publisher(
                    learner,
                    engine,
                    config.weights,
                    probe=probe,
                    threshold=threshold,
                    on_published=lambda version: bench.note(f"all servers have version {version}"),
                )
            try:
                yield Models(config, folder, learner, plan, probe, threshold, engine, publisher)
            finally:
                if publisher is not None:
                    await publisher.close()
        failure.raise_error()


async def parity(bench: Bench, models: Models) -> None:
    """Compare log-probabilities of at least 1,000 tokens, with the weights that both sides have loaded."""
    expected = await models.learner.logprobs_of(models.probe.texts)
    found = compare(expected, await _scores(models))
    bench.measured(**_figures(found))
    check(found, models.threshold)


async def _scores(models: Models) -> list[list[NDArray[np.float32]]]:
    return [await models.engine.score(text) for text in models.probe.texts]


def _figures(found: Parity) -> dict[str, float]:
    return {
        "parity_mean": found.mean,
        "parity_percentile": found.percentile,
        "parity_largest": found.largest,
        "parity_tokens": found.tokens,
    }


async def publication(bench: Bench, models: Models) -> None:
    """Publish changed weights while requests are in flight; servers must then answer with them, and lose no token."""
    async with traffic(bench, models) as requests:
        before = await models.learner.logprobs_of(models.probe.texts)
        await change_weights(bench, models, before)
        bench.note("publishing, with requests in flight")
        published = await publish(models)
        bench.note("waiting for the requests in flight")
    bench.measured(
        pause_s=published.paused_s,
        publication_s=published.total_s,
        published_gib=published.num_bytes / 2**30,
        requests=len(requests.answers),
        requests_across_the_update=requests.across,
    )
    await check_new_weights(bench, models, before)
    require(requests.across > 0, f"none of {len(requests.answers)} requests was in flight across the update")
    requests.check_versions()
    _compare_with_copy(bench, models, published)


async def publish(models: Models) -> Publication:
    await models.publisher.begin()
    published = await models.publisher.wait_published()
    assert published is not None, "it has begun"
    return published


async def change_weights(bench: Bench, models: Models, before: Sequence[NDArray[np.float32]]) -> None:
    """Train until log-probabilities have changed so much that old weights could not pass for new ones."""
    wanted = CHANGE_FACTOR * MEAN_SHARE * models.threshold
    changed = 0.0
    for _ in range(MAX_STEPS):
        bench.note("a training step that changes the weights")
        await learn(models.learner, made_groups(models.config, models.folder, models.learner.version, 2, length=64))
        after = await models.learner.logprobs_of(models.probe.texts)
        changed = compare(before, [[values] for values in after]).mean
        if changed > wanted:
            bench.measured(change_of_logprobs=changed)
            return
    raise CheckFailedError(
        f"{MAX_STEPS} training steps changed log-probabilities by only {changed:.3g} on average, so that old weights "
        f"could not be told from new ones; raise learner.learning_rate"
    )


async def check_new_weights(bench: Bench, models: Models, before: Sequence[NDArray[np.float32]]) -> None:
    """Compare what servers answer with the learner's new weights, over the whole probe. Raises CheckFailedError if they
    are nearer to the weights of `before`, ParityError if they are otherwise wrong."""
    scores = await _scores(models)
    found = compare(await models.learner.logprobs_of(models.probe.texts), scores)
    bench.measured(**_figures(found))
    old = compare(before, scores)
    require(
        found.mean < old.mean, f"a server answers with old weights: it is off by {found.mean:.3g} from the new ones"
    )
    check(found, models.threshold)


def _compare_with_copy(bench: Bench, models: Models, published: Publication) -> None:
    """Say if the pause is long beside a plain copy of as many bytes."""
    on_device = models.config.inference.weight_transfer != "shm"
    name = "copy_on_device_gb_s" if on_device else "copy_from_host_gb_s"
    rate = bench.settings.earlier.get("speed", {}).get(name)
    if not rate:
        return
    copy_s = published.num_bytes / (rate * 1e9)
    bench.measured(pause_in_copies=published.paused_s / copy_s)
    if published.paused_s > max(PAUSE_FLOOR_S, PAUSE_COPIES * copy_s):
        bench.slow(
            f"generation paused for {published.paused_s:.2f} s, and a plain copy of {published.num_bytes / 2**30:.2f} "
            f"GiB takes {copy_s:.2f} s: the rest is the server's own loading of the weights, see its log"
        )


async def kill(bench: Bench, models: Models) -> None:
    """Kill a server while new weights are on their way and requests in flight. It must come back with the new weights,
    and every request must be answered."""
    engine = models.engine
    assert isinstance(engine, ServerEngine), "a plug-in's servers cannot be killed from here"
    deaths = (await engine.metrics())["deaths"]
    async with traffic(bench, models) as requests:
        before = await models.learner.logprobs_of(models.probe.texts)
        await change_weights(bench, models, before)
        await models.publisher.begin()
        os.killpg(engine.guards()[0], signal.SIGKILL)
        killed = time.monotonic()
        usual = models.config.usual_start_of_servers
        bench.note(f"killed a server; waiting until it is back with the new weights ({usual})")
        await models.publisher.wait_published()
        bench.measured(back_s=time.monotonic() - killed)
        bench.note("waiting for the requests in flight")
    deaths = (await engine.metrics())["deaths"] - deaths
    bench.measured(deaths=deaths, requests=len(requests.answers), asked_again=requests.asked_again)
    require(deaths >= 1, "no server was found dead, although one was killed")
    await check_new_weights(bench, models, before)


@dataclass(slots=True)
class Traffic:
    """What requests in flight have got."""

    answers: list[Generation] = field(default_factory=list)
    asked_again: float = 0.0

    @property
    def across(self) -> int:
        """Requests whose tokens are of several versions."""
        return sum(len(set(answer.versions.tolist())) > 1 for answer in self.answers)

    def check_versions(self) -> None:
        """Raises CheckFailedError if a token is of an older version than the one before it."""
        for answer in self.answers:
            require(bool((np.diff(answer.versions) >= 0).all()), "a token is older than the one before it")


@asynccontextmanager
async def traffic(bench: Bench, models: Models) -> AsyncIterator[Traffic]:
    """Keep requests in flight; at the end wait for those that have begun. Raises CheckFailedError if one fails or is
    answered short."""
    spec = replace(models.engine.client_spec(), stream_every=32)
    client, found, ends = open_client(spec), Traffic(), asyncio.Event()
    clients = [asyncio.create_task(_ask_until(ends, client, models, found, number)) for number in range(CLIENTS)]
    try:
        yield found
        ends.set()
        for failed in [each for each in await asyncio.gather(*clients, return_exceptions=True) if each is not None]:
            raise CheckFailedError(f"a request failed: {type(failed).__name__}: {failed}")
        found.asked_again = client.metrics()["asked_again"]
    finally:
        await cancel_and_wait(clients)
        await client.close()


async def _ask_until(ends: asyncio.Event, client: InferenceClient, models: Models, found: Traffic, number: int) -> None:
    prompt = [int(token) for token in models.probe.texts[number % len(models.probe.texts)]][:64]
    new_tokens = min(NEW_TOKENS, models.config.model.max_length - len(prompt))
    for turn in itertools.count():
        sampling = SamplingParams(max_new_tokens=new_tokens)
        answer = await client.generate(prompt, sampling, request_id=f"c{number}-{turn}", timeout_s=REQUEST_S)
        complete = answer.finish_reason == "stop" or len(answer.token_ids) == new_tokens
        require(complete, f"a request got {len(answer.token_ids)} of {new_tokens} tokens")
        found.answers.append(answer)
        if ends.is_set():
            return


async def placed(bench: Bench, models: Models) -> None:
    """Compare the GPUs on which processes of ranks and servers are, as the driver sees them, with the plan."""
    if not models.plan.uses_gpus:
        raise NotPossibleError("nothing here runs on a GPU")
    found = _found_places(models, read_driver())
    if not found:
        raise NotPossibleError("the driver does not show our processes here, as in many containers")
    numbers = {gpu.uuid: str(number) for number, gpu in enumerate(read_driver().gpus)}
    planned: dict[str, set[str]] = {}
    for row in models.plan.rows:
        if row.gpus:
            name = row.part.name if row.part.kind == "server" else "ranks"
            planned.setdefault(name, set()).update(numbers.get(gpu, gpu) for gpu in row.gpus)
    bench.measured(planned=_places_text(planned), found=_places_text(found))
    require(found == planned, f"planned: {_places_text(planned)}; found: {_places_text(found)}")


def _found_places(models: Models, driver: Driver) -> dict[str, set[str]]:
    """Return the numbers of the GPUs by `server N` and `ranks`."""
    owners = {child.pid: "ranks" for child in psutil.Process().children(recursive=True)}
    if isinstance(models.serving, ServerEngine):
        for index, guard in enumerate(models.serving.guards()):
            for child in psutil.Process(guard).children(recursive=True):
                owners[child.pid] = f"server {index}"
    found: dict[str, set[str]] = {}
    for number, gpu in enumerate(driver.gpus):
        for pid in gpu.processes:
            if pid in owners:
                found.setdefault(owners[pid], set()).add(str(number))
    return found


def _places_text(places: Any) -> str:
    return ", ".join(f"{name} on GPU {'+'.join(sorted(gpus))}" for name, gpus in sorted(places.items()))
