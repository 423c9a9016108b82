"""Tools are shown by the model's own chat template where it knows them, and as text where it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from roll_flash.chat.openai_client import OpenAIChatClient
from roll_flash.chat.templates import Conversation, chat_template_of
from roll_flash.engines.inference import Generation
from roll_flash.envs import ToolEnv, tool
from roll_flash.envs.adapters.openenv.client import OpenEnv
from roll_flash.envs.adapters.verifiers.tasks import Verifiers
from roll_flash.envs.tools.calls import parse_tool_calls
from roll_flash.envs.tools.functions import make_tool
from roll_flash.envs.tools.prompt import TOOL_SCHEMAS
from roll_flash.envs.tools.tool_chat import ToolChat, declared_tools
from roll_flash.errors import ConfigError
from roll_flash.models.prepare import resolve_model
from roll_flash.rollout.episodes.conversation import ChatPolicy, TokenPolicy
from roll_flash.types import Message, SamplingParams

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "{{ '<tools>' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif not (tools and loop.first and m['role'] == 'system') %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ '<|begin|>' }}{% for m in messages %}{% set role = 'ipython' if m['role'] == 'tool' else m['role'] %}"
    "{{ '<|header|>' + role + '<|end_header|>' }}"
    "{% if tools and m['role'] == 'user' and (messages[:loop.index0] | selectattr('role', 'equalto', 'user')"
    " | list | length) == 0 %}{% for t in tools %}{{ (t | tojson(indent=4)) + '\n' }}{% endfor %}{% endif %}"
    "{{ m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>' }}{% endif %}"
)
NO_TOOL_ROLE = HERMES.replace(
    "{% if m['role'] == 'tool' %}", "{% if m['role'] == 'tool' %}{{ raise_exception('unknown role') }}"
)
MOVES_TOOLS = (
    "{% for m in messages %}{% if tools and loop.last and m['role'] == 'user' %}"
    "{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}{{ '[' + m['role'] + ']' + m['content'] + '<|eot|>' }}"
    "{% endfor %}"
)
END = {"hermes": "<|im_end|>", "llama": "<|eot|>", "plain": "<|im_end|>", "moves_tools": "<|eot|>"}


class Shop(ToolEnv):
    instructions = "Sell."

    async def begin(self, seed: int) -> str:
        return "What does a fig cost?"

    @tool()
    def price(self, fruit: str) -> int:
        """Tells the price of one fruit."""
        return 7


def tokenizer_with(template: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    special = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def sampled(tokenizer: Any, text: str) -> Generation:
    token_ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    return Generation(
        token_ids, np.zeros(len(token_ids), np.float32), np.zeros(len(token_ids), np.int32), "stop", "server", 0.1
    )


def play(template: str, end: str) -> tuple[Any, Any, Conversation, list[Message]]:
    """Two turns with a tool, as an episode plays them: schemas, tokenizer, conversation, last observation."""

    async def run() -> tuple[Any, Any, Conversation, list[Message]]:
        tokenizer, env = tokenizer_with(template), Shop()
        messages, info = await env.reset(seed=0)
        tools, _ = declared_tools(info)
        chat = ToolChat(tools, chat_template_of(tokenizer))
        conversation = Conversation(tokenizer, chat.opening(messages), chat.native)
        call = '<tool_call>{"name": "price", "arguments": {"fruit": "fig"}}</tool_call>'
        observation: Any = []
        for _ in range(2):
            text = conversation.add_generation(sampled(tokenizer, call + call + end))
            observation, *_ = await env.step(text)
            conversation.add_observation(chat.results(observation))
        return tools, tokenizer, conversation, observation

    return asyncio.run(run())


@pytest.mark.parametrize(("style", "template"), [("hermes", HERMES), ("llama", LLAMA)])
def test_a_template_that_knows_tools_renders_tools_and_results_itself(style: str, template: str) -> None:
    tools, tokenizer, conversation, observation = play(template, END[style])
    rendered = tokenizer.apply_chat_template(
        conversation.messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(conversation.token_ids) == rendered
    assert conversation.token_ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert "Tells the price of one fruit." in rendered
    assert [message["role"] for message in observation] == ["tool", "tool"]
    assert [message["role"] for message in conversation.messages[-2:]] == ["tool", "tool"]
    assert conversation.messages[0]["content"] == "Sell."
    if style == "llama":
        assert rendered.count("<|header|>ipython<|end_header|>7<|eot|>") == 4


@pytest.mark.parametrize(("style", "template"), [("plain", PLAIN), ("moves_tools", MOVES_TOOLS)])
def test_a_template_that_cannot_keep_tools_gets_them_as_text(style: str, template: str) -> None:
    _, tokenizer, conversation, _ = play(template, END[style])
    assert not chat_template_of(tokenizer).shows_tools
    text = tokenizer.decode(conversation.token_ids)
    assert text.count("Tells the price of one fruit.") == 1
    assert '<tool_call>\n{"name": <function-name>' in text
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert conversation.messages[-1]["content"].count("<tool_response>\n7\n</tool_response>") == 2


def test_results_are_text_where_the_template_knows_tools_but_not_their_results() -> None:
    _, tokenizer, conversation, _ = play(NO_TOOL_ROLE, END["hermes"])
    assert chat_template_of(tokenizer).shows_tools
    assert "<tools>\n{" in tokenizer.decode(conversation.token_ids)
    assert conversation.messages[-1]["role"] == "user"


def test_an_environment_without_tools_is_shown_as_it_is() -> None:
    chat = ToolChat(None, None)
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    assert chat.opening(messages) == messages
    assert chat.results([{"role": "tool", "content": "kept"}]) == [{"role": "tool", "content": "kept"}]
    assert chat.shown is None
    assert declared_tools({"seed": 3}) == (None, {"seed": 3})


def test_episodes_keep_the_names_of_what_was_offered_and_not_the_schemas() -> None:
    _, info = asyncio.run(Shop().reset(seed=0))
    tools, kept = declared_tools(info)
    assert tools == info[TOOL_SCHEMAS]
    assert kept == {"offered_tools": ["price"]}


def test_what_a_native_model_writes_is_understood_after_its_special_tokens_are_gone() -> None:
    def price(fruit: str) -> int:
        """Tells the price."""
        return 7

    tools = {"price": make_tool(price)}
    for text in (
        '[{"name": "price", "arguments": {"fruit": "fig"}}]',
        '{"name": "price", "parameters": {"fruit": "fig"}}',
    ):
        (call,) = parse_tool_calls(text, tools)
        assert call.name == "price"


CALL = {"id": "abc", "type": "function", "function": {"name": "price", "arguments": '{"fruit": "fig"}'}}


def evaluate_at(endpoint: Any) -> tuple[list[str], list[Message], list[dict[str, Any]]]:
    """An episode with a chat endpoint: what the environment was given and how the tools were shown, the conversation,
    the requests."""

    async def run() -> tuple[list[str], list[Message], list[dict[str, Any]]]:
        requests: list[dict[str, Any]] = []

        async def handle(request: web.Request) -> web.Response:
            requests.append(await request.json())
            status, answer = endpoint(requests[-1], len(requests))
            return web.json_response(answer, status=status)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = OpenAIChatClient(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "small", backoff_s=0.01)
        try:
            policy, env, texts = ChatPolicy(client, SamplingParams()), Shop(), []
            messages, info = await env.reset(seed=0)
            policy.begin(messages, declared_tools(info)[0])
            for _ in range(2):
                texts.append((await policy.act(10)).text)
                observation, *_ = await env.step(texts[-1])
                policy.observe(observation if isinstance(observation, list) else [])
            return [*texts, str(policy.tools_shown)], list(policy.messages()), requests
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


def completion(content: str | None, *calls: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


def test_an_endpoint_is_told_the_tools_and_its_calls_reach_the_environment() -> None:
    def endpoint(request: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        return 200, completion(None, CALL, {**CALL, "id": "xyz"}) if number == 1 else completion("It costs 7.")

    texts, messages, requests = evaluate_at(endpoint)
    assert requests[0]["tools"][0]["function"]["name"] == "price"
    assert texts[0].count('"price"') == 2
    assert texts[1:] == ["It costs 7.", "request"]
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in requests[1]["messages"][-2:]] == [
        ("tool", "abc", "7"),
        ("tool", "xyz", "7"),
    ]
    assert requests[1]["messages"][-3]["tool_calls"] == [CALL, {**CALL, "id": "xyz"}]
    assert messages[2]["content"] == texts[0]


@pytest.mark.parametrize("arguments", ['{"fruit": ', "fig", '["fig"]', '{"fruit": ' + "[" * 70 + "]" * 70 + "}"])
def test_an_endpoint_gets_arguments_that_are_no_object_as_one(arguments: str) -> None:
    """vLLM and others refuse a conversation with such a call, although their model wrote it: no sample instead of 0."""

    def endpoint(request: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        written = {"name": "price", "arguments": arguments}
        return 200, completion(None, {**CALL, "function": written}) if number == 1 else completion("It costs 7.")

    texts, messages, requests = evaluate_at(endpoint)
    (call,) = requests[1]["messages"][-2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"arguments": arguments}
    assert call["id"] == "abc"
    assert str(requests[1]["messages"][-1]["content"]).startswith("Error: ")
    assert messages[2]["content"] == texts[0]
    assert json.dumps(arguments) in texts[0]


def test_an_endpoint_that_refuses_tools_gets_them_as_text(caplog: pytest.LogCaptureFixture) -> None:
    def endpoint(request: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        if "tools" in request:
            return 400, {"error": {"message": "tools need --enable-auto-tool-choice"}}
        text = '<tool_call>{"name": "price", "arguments": {"fruit": "fig"}}</tool_call>'
        return 200, completion(text if number == 2 else "It costs 7.")

    texts, _, requests = evaluate_at(endpoint)
    assert len(requests) == 3
    assert "Tells the price of one fruit." in requests[1]["messages"][0]["content"]
    assert requests[2]["messages"][-1] == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}
    assert texts[1:] == ["It costs 7.", "text"]
    assert "--enable-auto-tool-choice" in caplog.text


class Caller:
    """An inference client that always makes the same call."""

    def __init__(self, tokenizer: Any) -> None:
        self._answer = sampled(tokenizer, '{"name": "price", "parameters": {"fruit": "fig"}}<|eot|>')

    async def generate(self, token_ids: Any, sampling: SamplingParams, **_: Any) -> Generation:
        return self._answer


def test_a_policy_whose_tokens_are_kept_shows_tools_by_the_template() -> None:
    async def run() -> tuple[str, TokenPolicy]:
        tokenizer, env = tokenizer_with(LLAMA), Shop()
        client: Any = Caller(tokenizer)
        policy = TokenPolicy(client, tokenizer, SamplingParams(), episode_id="e", max_length=4096)
        messages, info = await env.reset(seed=0)
        policy.begin(messages, declared_tools(info)[0])
        observation, *_ = await env.step((await policy.act(10)).text)
        assert isinstance(observation, list)
        policy.observe(observation)
        await policy.act(10)
        return tokenizer.decode(policy.samples()[0].token_ids), policy

    text, policy = asyncio.run(run())
    assert policy.tools_shown == "template"
    assert "Tells the price of one fruit." in text
    assert "<|header|>ipython<|end_header|>7<|eot|><|header|>assistant<|end_header|>{" in text


@pytest.mark.parametrize(
    "make",
    [lambda named: Verifiers("nothing", tool_format=named), lambda named: OpenEnv("http://x", tool_format=named)],
)
def test_a_format_that_there_is_not_is_refused_and_hides_no_tools(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=r"tool_format must be one of native, .*, not 'qwen'"):
        make("qwen")
