"""An endpoint is asked once before an evaluation starts: what is wrong with it is one line, not a failure per task."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web
from test_openai_client import COMPLETION, Script, serving

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.evaluator import check_endpoint

WITHOUT_USAGE = {"choices": COMPLETION["choices"]}


def check(answer: Any, eval: EvalConfig | None = None, *, key: str | None = None, timeout_s: float = 20) -> str | None:
    async def ask() -> str | None:
        async with serving(answer) as url:
            return await check_endpoint(url, "small", key, eval or EvalConfig(), timeout_s=timeout_s)

    return asyncio.run(ask())


def test_a_good_endpoint_is_asked_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    script = Script((200, COMPLETION, {}))
    assert check(script, key="SOME_KEY") is None
    assert [body["max_tokens"] for body in script.bodies] == [1]
    assert script.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "needs a key.*--api-key-env"), (404, "server knows the model 'small'"), (400, "HTTP 400")],
)
def test_a_refusal_is_said_at_once(status: int, words: str) -> None:
    script = Script((status, "no", {}))
    with pytest.raises(InferenceError, match=words):
        check(script)
    assert len(script.bodies) == 1


def test_an_endpoint_that_is_down_is_named() -> None:
    with pytest.raises(InferenceError, match=r"127\.0\.0\.1:9.*no connection: Connection refused; is the server up"):
        asyncio.run(check_endpoint("http://127.0.0.1:9/v1", "small", None, EvalConfig()))


def test_an_endpoint_that_hangs_is_given_up() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    began = time.monotonic()
    with pytest.raises(InferenceError, match=r"no answer to a request for one token within 0\.3 s"):
        check(hang, timeout_s=0.3)
    assert time.monotonic() - began < 30


def test_without_token_counts_there_is_a_warning_and_no_budget_of_tokens() -> None:
    silent = Script((200, WITHOUT_USAGE, {}))
    assert "tokens and cost will not be known" in str(check(silent))
    for budget in (EvalConfig(max_tokens_total=10), EvalConfig(max_cost=1, price_prompt=1)):
        with pytest.raises(ConfigError, match="cannot be kept; use --max-minutes"):
            check(silent, budget)
    assert check(silent, EvalConfig(max_minutes=1)) is not None
