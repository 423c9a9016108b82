"""What a client of Tinker's API sends wrongly is refused with one line, and nothing of it is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from roll_flash.config.tree import load_config
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.gateway.server import GatewayServer
from roll_flash.tinker.messages import _TYPES, FLOAT32, INT64, GradientRequest, read_gradient_request
from roll_flash.tinker.routes import ClientSession, Sampler, TinkerRoutes
from roll_flash.tinker.training import LORA_FILE, read_lora

KEY = "tml-key"


def gradient_request(tokens: bytes, targets: Any) -> GradientRequest:
    request = _TYPES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    given = datum.loss_fn_inputs.add(key="target_tokens")
    given.value.dense = targets.tobytes()
    given.value.dtype = FLOAT32 if targets.dtype == np.float32 else INT64
    return read_gradient_request(request.SerializeToString(), vocabulary=100, max_length=64)


def test_tokens_are_whole_numbers() -> None:
    three = np.arange(3, dtype=np.int32).tobytes()
    assert gradient_request(three, np.arange(3)).sequences[0].token_ids.tolist() == [0, 1, 2, 2]
    with pytest.raises(ApiError, match="11 bytes are no int32"):
        gradient_request(three[:-1], np.arange(3))
    with pytest.raises(ApiError, match="no int64"):
        gradient_request(three, np.float32([0, 1, 2.5]))


def test_what_would_be_done_wrongly_is_refused() -> None:
    """A request without a number got the result of the first one without any, or that of the model's creation."""

    async def scenario() -> None:
        config = load_config({"name": "s", "model": {"path": "tiny"}, "envs": [{"id": "agents"}]})
        servers: Any = SimpleNamespace(vocabulary=100, folder=Path(), config=config, end_ids=frozenset())
        gateway = GatewayServer(SimpleNamespace(model="tiny", max_length=64), call_timeout_s=1)  # type: ignore[arg-type]
        routes = TinkerRoutes(gateway, servers, frozenset({"tiny"}), Path())
        model: Any = SimpleNamespace(model_id="s:train:0")
        routes._sessions["s"] = ClientSession("s", model=model)
        routes._samplers["s:sample:0"] = Sampler(None)
        with pytest.raises(ApiError, match="seq_id must be given"):
            await routes._sample({"sampling_session_id": "s:sample:0", "prompt": {"chunks": [{"tokens": [1]}]}})
        with pytest.raises(ApiError, match="seq_id must be given"):
            await routes._step({"model_id": "s:train:0", "adam_params": {}})
        with pytest.raises(ApiError, match="eps must be a number from 1e-20 to 1"):
            await routes._step({"model_id": "s:train:0", "seq_id": 1, "adam_params": {"eps": 0}})

    asyncio.run(scenario())


@pytest.mark.parametrize("content", ["", "[1]", "5", '{"rank": "many"}', "[" * 100_000])
def test_a_checkpoint_with_damaged_adapters_is_not_found(content: str, tmp_path: Path) -> None:
    (tmp_path / LORA_FILE).write_text(content)
    with pytest.raises(ApiError, match="no complete checkpoint of save_state"):
        read_lora(tmp_path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"session_id": "s", "base_model": ["tiny"], "lora_config": {"rank": 1}}),
        ("create_sampling_session", {"session_id": "s", "model_path": {"a": 1}}),
        ("create_sampling_session", {"session_id": "s", "base_model": {"a": 1}}),
        ("asample", {"sampling_session_id": "s:sample:0", "prompt": {"chunks": [{"tokens": 5}]}}),
        ("asample", {"sampling_session_id": "s:sample:0", "prompt": {"chunks": [{"tokens": [1]}, {"tokens": "12"}]}}),
        ("optim_step", {"model_id": ["s"], "adam_params": {}}),
        ("load_weights", {"session_id": "s", "path": "tinker://s:train:0/weights/.."}),
        ("retrieve_future", {"request_id": ["s"]}),
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_the_clients_fault(path: str, body: dict[str, Any]) -> None:
    async def ask() -> httpx.Response:
        backend: Any = SimpleNamespace(model="tiny", max_length=64)
        servers: Any = SimpleNamespace(vocabulary=100, folder=Path(), config=None)
        gateway = GatewayServer(backend, call_timeout_s=1, admin_key=KEY)
        routes = TinkerRoutes(gateway, servers, frozenset({"tiny"}), Path())
        routes._sessions["s"] = ClientSession("s")
        routes._samplers["s:sample:0"] = Sampler(None)
        port = await gateway.start("127.0.0.1")
        try:
            async with httpx.AsyncClient(headers={"x-api-key": KEY}) as http:
                return await http.post(f"http://127.0.0.1:{port}/api/v1/{path}", json=body, timeout=20)
        finally:
            await gateway.close()

    answer = asyncio.run(ask())
    assert answer.status_code in (400, 404, 410), answer.text
