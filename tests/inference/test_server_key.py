"""A server answers its run only, whoever else is on the machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from roll_flash.errors import InferenceError
from roll_flash.inference.client.token_client import TokenClient
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.processes.keys import bearer
from roll_flash.types import SamplingParams
from tests.inference.conftest import Served

CONTROL = [
    *("/pause", "/resume", "/update_weights", "/start_weight_update", "/finish_weight_update", "/reset_prefix_cache"),
    *(
        "/init_weight_transfer_engine",
        "/update_weight_version",
        "/inference/v1/generate",
        "/v1/completions",
        "/nowhere",
    ),
]
TRICKS = ["/health/", "//health", "/health/../metrics", "/metrics?x=/health", "/Health"]


def test_every_route_but_health_asks_for_the_key_of_the_run(served: Served) -> None:
    spec = served.engine.client_spec()
    wrong = [{}, bearer(""), bearer("wrong"), {"Authorization": spec.key}, {"Authorization": f"Basic {spec.key}"}]
    wrong += [{"Authorization": b"Bearer \xff"}]  # type: ignore[dict-item]
    wrong += [bearer(spec.key[:-1]), bearer(spec.key + "x"), {"x-api-key": spec.key}]

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=spec.endpoints[0], timeout=60) as http:
            routes = [(method, path) for path in CONTROL for method in ("POST", "OPTIONS")]
            routes += [("GET", path) for path in ("/metrics", "/weight_info", "/openapi.json", "/docs", *TRICKS)]
            described = await http.get("/openapi.json", headers=bearer(spec.key))
            if described.is_success:  # vLLM tells all it has
                paths = described.json()["paths"]
                assert len(paths) > 20
                routes += [(method, path) for path, methods in paths.items() for method in methods if path != "/health"]
            for method, path in routes:
                assert (await http.request(method, path)).status_code == 401, (method, path)
            for headers in wrong:
                assert (await http.post("/pause", headers=headers)).status_code == 401, headers
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/metrics", headers=bearer(spec.key))).status_code == 200

    served.run(ask())


def test_a_client_without_the_key_gets_nothing(served: Served) -> None:
    from dataclasses import replace

    async def ask() -> None:
        client = TokenClient(replace(served.engine.client_spec(), key="wrong"))
        try:
            await client.generate([5, 6], SamplingParams(max_new_tokens=2), request_id="x", timeout_s=60)
        finally:
            await client.close()

    with pytest.raises(InferenceError, match="HTTP 401"):
        served.run(ask())


def test_the_key_is_in_no_log_no_command_line_and_no_text_of_ours(served: Served) -> None:
    spec = served.engine.client_spec()
    engine = served.engine
    assert isinstance(engine, ServerEngine)
    assert len(spec.key) >= 32
    assert spec.key not in repr(spec)
    guard = engine.guards()[0]
    logs = served.scratch.glob("*.log")
    assert all(spec.key not in path.read_text(errors="replace") for path in logs)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert spec.key.encode() not in command.read_bytes(), command
        except (FileNotFoundError, ProcessLookupError):
            continue
    environment = Path(f"/proc/{guard}/environ").stat()
    assert environment.st_mode & 0o077 == 0


def test_two_runs_have_two_keys(served: Served, tmp_path: Path) -> None:
    from roll_flash.config.tree import InferenceConfig
    from roll_flash.inference.open import open_engine
    from roll_flash.models.prepare import resolve_model

    config = InferenceConfig(engine="transformers")
    engine = open_engine(config, model_folder=resolve_model("tiny"), max_model_len=64, logs=tmp_path)
    try:
        assert engine.client_spec().key != served.engine.client_spec().key
    finally:
        asyncio.run(engine.close())
