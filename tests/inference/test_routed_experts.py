"""The experts that a server used reach the learner: through turns, interruptions and the object store."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.model_check.architectures import write_model
from roll_flash.config.tree import Config, InferenceConfig, load_config
from roll_flash.engines.inference import InferenceEngine
from roll_flash.errors import ConfigError
from roll_flash.inference.client.http_connections import BadAnswerError
from roll_flash.inference.client.partial_turn import PartialTurn
from roll_flash.inference.client.token_client import open_client
from roll_flash.inference.client.token_protocol import Piece, decode_piece, encode_experts
from roll_flash.inference.open import open_engine, why_no_replay
from roll_flash.rollout.episodes.conversation import TokenPolicy
from roll_flash.types import SamplingParams

PROMPT = [9, 8, 7]
VLLM_PAYLOAD = (  # of vLLM 0.32: uint8, 2 tokens, 2 layers, 2 experts
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDIsIDIpLCB9ICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAQIDBAUG/w=="
)


def test_what_vllm_sends_is_read() -> None:
    answer = {"choices": [{"token_ids": [], "finish_reason": "stop", "routed_experts": VLLM_PAYLOAD}]}
    found = decode_piece(json.dumps(answer).encode()).routed_experts
    assert found is not None
    assert found.dtype == np.int16
    assert found.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 255]]]


def npy(header: bytes) -> str:
    return base64.b64encode(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("%", "AAAA", encode_experts(np.zeros(4, np.int16))),
        pytest.param(npy(b"{((("), id="open_brackets"),
        pytest.param(npy(b"{[]: 1}"), id="unhashable_key"),
        pytest.param(npy(b"{'descr': '|i1', 'fortran_order': False, 'shape': (9999999999, 1, 1)}"), id="cut_short"),
        pytest.param(base64.b64encode(b"PK\3\4").decode(), id="broken_archive"),
        pytest.param(base64.b64encode(b"PK\5\6" + bytes(18)).decode(), id="archive"),
    ],
)
def test_experts_that_cannot_be_read_are_a_bad_answer(text: str) -> None:
    with pytest.raises(BadAnswerError, match="routed experts"):
        decode_piece(json.dumps({"choices": [{"routed_experts": text}]}).encode())


def rows(first: int, last: int, request: int) -> NDArray[np.int16]:
    """Experts of the tokens `first` to `last`, which name their request and token."""
    return np.array([[[request, token]] for token in range(first, last)], np.int16).reshape(-1, 1, 2)


@given(
    known=st.integers(0, 2),
    cuts=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["dies", "abort"])), max_size=6),
)
def test_each_token_keeps_the_experts_of_the_request_that_computed_it_first(
    known: int, cuts: list[tuple[int, str]]
) -> None:
    """A server tells the experts of all but the last token at the end of a request; one that dies tells nothing."""
    total = 20
    turn = PartialTurn(PROMPT, SamplingParams(max_new_tokens=total), total, "r", 4, known_experts=known)
    expected: list[tuple[int, int]] = []
    made = 0
    for number, (count, end) in enumerate([*cuts, (total, "length")]):
        body = json.loads(turn.request())
        start = known + len(expected)
        assert body["sampling_params"].get("routed_experts_prompt_start", 0) == start
        assert start <= len(body["token_ids"])
        count = min(count, total - made)
        turn.take(Piece([1] * count, [-1.0] * count, [(0, 0, count)] if count else None, None))
        made += count
        if end == "dies":
            turn.end_early()
        else:
            experts = rows(start, len(PROMPT) + made - 1, number)
            turn.take(Piece([], [], [(0, 0, count)] if count else [], end, experts))  # type: ignore[arg-type]
            turn.finish()
        if end != "dies" and (count or end == "length"):
            expected += [(number, token) for token in range(start, len(PROMPT) + made - 1)]
        if turn.finish_reason is not None:
            break
    found = turn.generation("server").routed_experts
    assert ([] if found is None else found[:, 0].tolist()) == [list(each) for each in expected]


def test_experts_of_another_shape_than_before_are_a_bad_answer() -> None:
    turn = PartialTurn(PROMPT, SamplingParams(), 2, "r", None, known_experts=0)
    turn.request()
    turn.take(Piece([1], [-1.0], [(0, 0, 1)], "abort", rows(0, 3, 0)))
    turn.finish()
    turn.request()
    with pytest.raises(BadAnswerError, match=r"of shape \(1, 3\) for a token, before \(1, 2\)"):
        turn.take(Piece([2], [-1.0], [(0, 0, 1)], "length", np.zeros((1, 1, 3), np.int16)))


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        ([[[0, 4]]], "routed expert 4 of a model with 4 experts"),
        ([[[0, 1, 2]]], r"of shape \(1, 3\) for a token, not \(1, 2\)"),
        ([[[0, 1], [2, 3]]], r"of shape \(2, 2\) for a token, not \(1, 2\)"),
    ],
)
def test_experts_that_the_model_does_not_have_are_a_bad_answer(experts: Any, says: str) -> None:
    """In the learner they would be an index out of range, which ends a rank."""
    found = np.array(experts, np.int16)
    for sizes in ((1, 2, 4), (None, None, None)):
        turn = PartialTurn(PROMPT, SamplingParams(), 2, "r", None, known_experts=0, expert_sizes=sizes)
        turn.request()
        piece = Piece([1], [-1.0], [(0, 0, 1)], "abort", found)
        if sizes[0] is None:
            turn.take(piece)
        else:
            with pytest.raises(BadAnswerError, match=says):
                turn.take(piece)


def test_an_answer_without_experts_is_a_bad_one_where_they_were_promised() -> None:
    turn = PartialTurn(PROMPT, SamplingParams(), 2, "r", None, known_experts=0)
    turn.request()
    turn.take(Piece([1, 2], [-1.0, -1.0], [(0, 0, 2)], "length", rows(0, 3, 0)))
    with pytest.raises(BadAnswerError, match="of 3 tokens, not of 4"):
        turn.finish()
    turn.discard()
    turn.request()
    turn.take(Piece([1, 2], [-1.0, -1.0], [(0, 0, 2)], "length", rows(0, 4, 1)))
    turn.finish()
    found = turn.generation("server").routed_experts
    assert found is not None
    assert found[:, 0].tolist() == [[1, 0], [1, 1], [1, 2], [1, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("deepseek_v3", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[tuple[InferenceEngine, asyncio.AbstractEventLoop]]:
    config = InferenceConfig(engine="transformers")
    engine = open_engine(config, model_folder=folder, max_model_len=256, logs=folder, returns_experts=True)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.start())
        yield engine, loop
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


def test_the_learner_gets_the_logprobs_of_the_server_by_using_its_experts(
    folder: Path, engine: tuple[InferenceEngine, asyncio.AbstractEventLoop]
) -> None:
    """The router of DeepSeek-V3 has a bias that changes only the choice. The learner has another one than the server:
    without replay the log-probabilities of a conversation differ, with replay they do not."""
    import torch
    from transformers import AutoTokenizer

    from roll_flash.learner.model.policy_model import load_policy_model
    from roll_flash.learner.packing.rows import pack
    from roll_flash.learner.packing.sequences import PlannedTrajectory
    from roll_flash.stream.blocks import TokenArrays, TokenBlock

    served, loop = engine
    assert served.client_spec().expert_sizes == (2, 2, 4)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def play() -> Any:
        client = open_client(replace(served.client_spec(), stream_every=4), tokenizer)
        try:
            sampling = SamplingParams(max_new_tokens=12, seed=3)
            policy = TokenPolicy(client, tokenizer, sampling, episode_id="e", max_length=200)
            policy.begin([{"role": "user", "content": "abc"}])
            await policy.act(60)
            policy.observe([{"role": "user", "content": "def"}])
            await policy.act(60)
            return policy.samples()[0]
        finally:
            await client.close()

    arrays = loop.run_until_complete(play())
    length = len(arrays.token_ids)
    assert arrays.routed_experts.shape == (length, 2, 2)
    assert (arrays.routed_experts[:-1] >= 0).all(), "each token that was computed has experts"
    assert (arrays.routed_experts[-1] == -1).all()
    fields = {name: getattr(arrays, name) for name in ("token_ids", "policy_mask", "logprobs", "versions")}
    block = TokenBlock({**fields, "routed_experts": arrays.routed_experts}, [0, length], [(length,)], [()])

    policy = load_policy_model(folder)
    for name, bias in policy.model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.tensor([2.0, 0.0, 1.0, -1.0]))

    def largest_difference(tokens: TokenArrays) -> float:
        planned = PlannedTrajectory("g", None, (1.0,), 1.0, 1, length, arrays.prompt_length)
        (row,) = pack(planned.sequences(tokens), 1000)
        with torch.no_grad():
            logprobs, _ = policy(row)
        return float((logprobs - torch.tensor(row.behavior_logprobs)).abs().max())

    assert largest_difference(replace(block[0], routed_experts=None)) > 1e-2
    assert largest_difference(block[0]) < 1e-4


def config_of(**changes: Any) -> Config:
    return load_config("configs/quickstart.yaml", [f"{key}={value}" for key, value in changes.items()])


def test_replay_is_on_where_servers_return_experts_and_the_reason_is_said_where_not(
    folder: Path, tmp_path: Path
) -> None:
    with_transformers = {"inference.engine": "transformers"}
    assert why_no_replay(config_of(**with_transformers), folder) is None
    assert why_no_replay(config_of(**with_transformers, **{"learner.routing_replay": "false"}), folder) == ""
    dense = write_model("qwen3", tmp_path)
    assert why_no_replay(config_of(**with_transformers), dense) == ""
    with pytest.raises(ConfigError, match="no experts; set it to auto"):
        why_no_replay(config_of(**with_transformers, **{"learner.routing_replay": "true"}), dense)


@pytest.mark.vllm
def test_vllm_on_a_cpu_returns_no_experts(folder: Path) -> None:
    assert "on GPUs only" in str(why_no_replay(config_of(**{"inference.engine": "vllm"}), folder))
    with pytest.raises(ConfigError, match="on GPUs only; set it to auto or false"):
        why_no_replay(config_of(**{"inference.engine": "vllm", "learner.routing_replay": "true"}), folder)
