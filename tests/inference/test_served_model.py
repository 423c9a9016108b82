"""What a user of the inference room gets, the same from both engines: exact tokens, logprobs, versions, updates."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from roll_flash.engines.inference import ClientSpec, Generation, StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.client.token_client import TokenClient, open_client
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.processes.keys import bearer
from roll_flash.types import SamplingParams

from .conftest import MAX_MODEL_LEN, Served

TOLERANCE = 1e-3
PROBE = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46."


def generate(served: Served, prompt: list[int], sampling: SamplingParams, timeout_s: float = 60) -> Generation:
    async def ask() -> Generation:
        client = open_client(served.engine.client_spec())
        try:
            return await client.generate(prompt, sampling, request_id=os.urandom(8).hex(), timeout_s=timeout_s)
        finally:
            await client.close()

    return served.run(ask())


def expected_logprobs(served: Served, prompt: list[int], generation: Generation) -> Any:
    return served.logprobs(prompt + generation.token_ids.tolist())[len(prompt) - 1 :]


def test_tokens_carry_the_version_that_sampled_them(served: Served) -> None:
    """0 until something was published: what the server loaded itself."""
    generation = generate(served, served.encode("abc"), SamplingParams(max_new_tokens=5, seed=1))
    assert (generation.versions == served.version).all()


def test_a_seed_means_the_same_when_prompts_are_read_in_pieces(served: Served) -> None:
    """Together these prompts are more than vLLM reads in one go, so that some of them are cut."""
    prompts = [served.encode(f"{number:02d} {PROBE} " * 7)[:400] for number in range(16)]
    sampling = SamplingParams(max_new_tokens=6, seed=7)

    async def ask_together() -> list[Generation]:
        client = open_client(served.engine.client_spec())
        try:
            asked = [
                client.generate(prompt, sampling, request_id=os.urandom(8).hex(), timeout_s=60) for prompt in prompts
            ]
            return list(await asyncio.gather(*asked))
        finally:
            await client.close()

    together = served.run(ask_together())
    for index in (0, 7, 15):
        alone = generate(served, prompts[index], sampling)
        assert together[index].token_ids.tolist() == alone.token_ids.tolist()


def test_logprobs_are_those_of_transformers(served: Served) -> None:
    token_ids = served.encode(PROBE)
    [score] = served.run(served.engine.score(token_ids))
    assert score.shape == (len(token_ids) - 1,)
    assert np.abs(score - served.logprobs(token_ids)).max() < TOLERANCE
    generation = generate(served, token_ids, SamplingParams(max_new_tokens=40, seed=3))
    assert np.abs(generation.logprobs - expected_logprobs(served, token_ids, generation)).max() < TOLERANCE
    assert generation.versions.shape == generation.logprobs.shape == generation.token_ids.shape


def test_logprobs_are_of_the_distribution_sampled_from(served: Served) -> None:
    """At temperature 2 with 2 tokens to choose from: log-softmax over the two largest halved logits."""
    import torch

    prompt = served.encode("2+2=")
    generation = generate(served, prompt, SamplingParams(temperature=2.0, top_k=2, max_new_tokens=12, seed=5))
    with torch.no_grad():
        logits = served.model(torch.tensor([prompt + generation.token_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
    best = (logits / 2).topk(2)
    chosen = best.indices == torch.tensor(generation.token_ids.tolist())[:, None]
    assert chosen.any(-1).all()
    assert np.abs(best.values.log_softmax(-1)[chosen].numpy() - generation.logprobs).max() < TOLERANCE


def test_greedy_takes_the_likeliest_token(served: Served) -> None:
    prompt = served.encode("hello")
    generation = generate(served, prompt, SamplingParams(temperature=0.0, max_new_tokens=8))
    again = generate(served, prompt, SamplingParams(temperature=0.0, max_new_tokens=8))
    assert generation.token_ids.tolist() == again.token_ids.tolist()
    assert np.abs(generation.logprobs - expected_logprobs(served, prompt, generation)).max() < TOLERANCE


@pytest.mark.parametrize(
    "extreme",
    [
        *({"temperature": value} for value in (5e-324, 1e-40, 1e-5)),
        *({"top_p": value} for value in (5e-324, 1e-40)),
        {"top_k": 1 << 24},
        {"seed": (1 << 62) + 128},
    ],
    ids=str,
)
def test_whatever_an_agent_may_ask_for_is_sampled(served: Served, extreme: dict[str, Any]) -> None:
    """An error of a server would be no sample of the agent's episode, and leave the server out for all others."""
    generation = generate(served, served.encode("2+2="), SamplingParams(**extreme, max_new_tokens=3))
    assert len(generation.token_ids) > 0
    assert np.isfinite(generation.logprobs).all()


def test_a_seed_repeats_a_turn(served: Served) -> None:
    prompt = served.encode("dice: ")
    first, second, other = (
        generate(served, prompt, SamplingParams(max_new_tokens=20, seed=seed)).token_ids.tolist() for seed in (7, 7, 8)
    )
    assert first == second != other


def test_a_turn_ends_at_its_limit_at_the_context_and_at_a_stop_string(served: Served) -> None:
    cut = generate(served, served.encode("abc"), SamplingParams(max_new_tokens=3, seed=1))
    assert (len(cut.token_ids), cut.finish_reason) in {(3, "length"), (len(cut.token_ids), "stop")}
    full = generate(served, served.encode("a" * (MAX_MODEL_LEN - 2)), SamplingParams(max_new_tokens=50, seed=1))
    assert len(full.token_ids) <= 2
    free = generate(served, served.encode("abc"), SamplingParams(max_new_tokens=60, seed=2))
    text = served.tokenizer.decode(free.token_ids.tolist(), skip_special_tokens=True)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = generate(served, served.encode("abc"), SamplingParams(max_new_tokens=60, seed=2, stop=(stop,)))
    kept = served.tokenizer.decode(stopped.token_ids.tolist(), skip_special_tokens=True)
    assert kept == text[: text.index(stop) + len(stop)]
    assert stopped.finish_reason == "stop"
    written = free.token_ids.tolist()
    end = written[len(written) // 2]
    ended = generate(served, served.encode("abc"), SamplingParams(max_new_tokens=60, seed=2, end_ids=(end,)))
    assert ended.token_ids.tolist() == written[: written.index(end) + 1]
    assert ended.finish_reason == "stop"


def test_a_prompt_without_room_is_refused_before_it_is_sent(served: Served) -> None:
    with pytest.raises(InferenceError, match=f"{MAX_MODEL_LEN} tokens leave no room"):
        generate(served, [5] * MAX_MODEL_LEN, SamplingParams())


def test_new_weights_reach_requests_in_flight_and_no_token_is_lost(served: Served) -> None:
    """Each token carries the version it was sampled with, and afterwards the server is exactly the new model.

    Exactness covers the output head of tied embeddings, of which vLLM keeps a packed copy on CPU.
    """

    async def publish_in_flight() -> list[Generation]:
        client = open_client(served.engine.client_spec())
        prompt = served.encode("count: 1 2 3 4 5")
        sampling = SamplingParams(max_new_tokens=400)
        asks = [
            asyncio.create_task(client.generate(prompt, sampling, request_id=f"r{time.time_ns()}", timeout_s=100))
            for _ in range(16)
        ]
        await asyncio.sleep(0.1)
        weights = served.change_weights()
        [update] = await served.engine.publish(weights)
        os.unlink(weights.path)
        assert (update.version, update.paused_s <= update.total_s) == (served.version, True)
        generations = await asyncio.gather(*asks)
        await client.close()
        return generations

    for _ in range(5):
        before = served.version
        generations = served.run(publish_in_flight())
        for generation in generations:
            assert set(generation.versions.tolist()) <= {before, before + 1}
            assert (np.diff(generation.versions) >= 0).all()
        probe = served.encode(PROBE)
        [score] = served.run(served.engine.score(probe))
        assert np.abs(score - served.logprobs(probe)).max() < TOLERANCE
        if any(len(set(generation.versions.tolist())) == 2 for generation in generations):
            break
    else:
        pytest.fail("no request was in flight across an update in five tries")
    fresh = generate(served, served.encode("count: 1 2 3 4 5"), SamplingParams(max_new_tokens=10, seed=1))
    assert (fresh.versions == served.version).all()
    prompt = served.encode("count: 1 2 3 4 5")
    assert np.abs(fresh.logprobs - expected_logprobs(served, prompt, fresh)).max() < TOLERANCE


def test_new_requests_do_not_build_on_keys_and_values_of_old_weights(served: Served) -> None:
    """The prefix is long enough to be cached, asked for again before, and held by a request in flight meanwhile."""
    prompt = served.encode("a prefix that fills some blocks of the cache " * 4)

    async def publish_with_prefix_in_use() -> Generation:
        client = open_client(served.engine.client_spec())
        holder = asyncio.create_task(
            client.generate(prompt, SamplingParams(max_new_tokens=300), request_id="holder", timeout_s=100)
        )
        await asyncio.sleep(0.05)
        weights = served.change_weights()
        await served.engine.publish(weights)
        os.unlink(weights.path)
        fresh = await client.generate(
            prompt, SamplingParams(max_new_tokens=10, seed=1), request_id="fresh", timeout_s=100
        )
        await holder
        await client.close()
        return fresh

    fresh = served.run(publish_with_prefix_in_use())
    assert np.abs(fresh.logprobs - expected_logprobs(served, prompt, fresh)).max() < TOLERANCE


def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(served: Served, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    bad = tmp_path / "bad.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, bad)
    probe = served.encode(PROBE)
    [before] = served.run(served.engine.score(probe))
    with pytest.raises(InferenceError, match=r"update_weights answered HTTP .*do not fit the"):
        served.run(served.engine.publish(StagedWeights(99, str(bad), 1)))
    assert served.run(served.engine.metrics())["deaths"] == 0
    generation = generate(served, probe, SamplingParams(max_new_tokens=5))
    assert (generation.versions == served.version).all()
    [after] = served.run(served.engine.score(probe))
    assert np.array_equal(before, after)


def test_giving_up_on_a_turn_frees_the_server(served: Served) -> None:
    async def give_up() -> float:
        client = open_client(served.engine.client_spec())
        sampling = SamplingParams(max_new_tokens=MAX_MODEL_LEN - 10, stop=("no such text",))
        asks = [
            asyncio.create_task(client.generate([5, 6, 7], sampling, request_id=f"gone-{i}", timeout_s=60))
            for i in range(32)
        ]
        await asyncio.sleep(0.15)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        for _ in range(100):
            if (running := await _running(served)) == 0:
                break
            await asyncio.sleep(0.05)
        await client.close()
        return running

    assert served.run(give_up()) == 0


async def _running(served: Served) -> float:
    """Requests in flight, as the server itself counts them."""
    spec = served.engine.client_spec()
    async with httpx.AsyncClient(base_url=spec.endpoints[0], headers=bearer(spec.key)) as http:
        text = (await http.get("/metrics")).text
    counts = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return sum(counts)


def test_a_turn_has_a_deadline(served: Served) -> None:
    with pytest.raises(TimeoutError):
        generate(served, [5, 6, 7], SamplingParams(max_new_tokens=500, seed=11), timeout_s=0.01)


def test_a_bad_request_names_the_server_and_the_reason(served: Served) -> None:
    with pytest.raises(InferenceError, match=r"http://127.0.0.1:\d+: HTTP 4\d\d"):
        generate(served, [5], SamplingParams(temperature=-1.0))


def test_a_killed_server_comes_back_with_the_newest_weights(served: Served) -> None:
    """Its requests in flight are asked again by the client, and the loss is counted."""
    engine = cast(ServerEngine, served.engine)
    weights = served.change_weights()
    served.run(engine.publish(weights))
    os.unlink(weights.path)
    deaths = engine.deaths

    async def kill_in_flight() -> list[Generation]:
        client = open_client(engine.client_spec())
        sampling = SamplingParams(max_new_tokens=400)
        # So that the client knows what the server had, and does not take less from it when it is back.
        await client.generate([5, 6, 7], SamplingParams(max_new_tokens=2), request_id="first", timeout_s=60)
        # Many, because some turns end before the blow.
        asks = [
            asyncio.create_task(client.generate([5, 6, 7], sampling, request_id=f"survivor-{i}", timeout_s=220))
            for i in range(16)
        ]
        await asyncio.sleep(0.05)
        _kill_server(engine)
        generations = await asyncio.gather(*asks)
        assert client.metrics()["asked_again"] > 0
        await client.close()
        return generations

    for generation in served.run(kill_in_flight()):
        assert (generation.versions == served.version).all()
    probe = served.encode(PROBE)
    [score] = served.run(engine.score(probe))
    assert np.abs(score - served.logprobs(probe)).max() < TOLERANCE
    assert engine.deaths == deaths + 1


def _kill_server(engine: ServerEngine) -> None:
    """SIGKILL to the server itself; its guard stays."""
    guard = engine.guards()[0]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = stat.read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        if int(state[1]) == guard:
            os.kill(int(stat.parent.name), signal.SIGKILL)


def test_no_server_at_all_is_an_error_that_names_it() -> None:
    async def ask() -> None:
        client = TokenClient(ClientSpec("vllm", ("http://127.0.0.1:9",), "policy", 64))
        try:
            await client.generate([1], SamplingParams(), request_id="a", timeout_s=0.5)
        finally:
            await client.close()

    with pytest.raises(InferenceError, match=r"no server could be reached for 0.5 s; last: http://127.0.0.1:9"):
        asyncio.run(ask())
