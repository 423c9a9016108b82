"""The clients that agents are written with find what they expect, plain and streamed."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import anthropic
import openai
import pytest
from conftest import MODEL, Serve, Served

from roll_flash.gateway.sessions.session import SessionSettings
from roll_flash.types import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
LOOP = [f"<think>\nsum\n</think>\n\nLet me see.\n{CALL}", "It is 5."]


def open_ai(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.session.api_key, max_retries=0)


def claude(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=served.session.api_key, max_retries=0)


def require_one_sample(served: Served, turns: int) -> None:
    (sample,) = served.session.history.samples()
    assert len(sample.turns) == turns
    assert served.session.trouble is None


@pytest.mark.parametrize("streams", [False, True])
def test_the_openai_clients_own_tool_loop(serve: Serve, streams: bool) -> None:
    async def work(served: Served) -> None:
        async with open_ai(served) as client:
            messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
            for _ in range(2):
                if streams:
                    async with client.chat.completions.stream(
                        model=MODEL, messages=messages, tools=[ADD], stream_options={"include_usage": True}
                    ) as stream:
                        completion: Any = await stream.get_final_completion()
                else:
                    completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])
                message = completion.choices[0].message
                assert completion.usage.completion_tokens > 0
                messages.append(message.to_dict())
                for call in message.tool_calls or ():
                    assert re.fullmatch("[A-Za-z0-9]{9}", call.id), "templates of Mistral's models refuse others"
                    numbers = json.loads(call.function.arguments)
                    result = str(numbers["a"] + numbers["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            assert message.content == "It is 5."
            assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
            assert messages[1]["content"] == "Let me see."
        require_one_sample(served, 2)

    serve(work, LOOP, "qwen3")


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_responses_with_a_tool(serve: Serve, streams: bool, chained: bool) -> None:
    tool: Any = {"type": "function", "name": "add", "description": "a + b", "parameters": SCHEMA, "strict": False}

    async def work(served: Served) -> None:
        async with open_ai(served) as client:

            async def ask(items: list[Any], previous: str | None) -> Any:
                fields: dict[str, Any] = {"model": MODEL, "input": items, "tools": [tool], "instructions": "Add."}
                if previous:
                    fields["previous_response_id"] = previous
                if not streams:
                    return await client.responses.create(**fields)
                async with client.responses.stream(**fields) as stream:
                    names = [event.type async for event in stream]
                    assert names[0] == "response.created"
                    assert names[-1] == "response.completed"
                    return await stream.get_final_response()

            items: list[Any] = [{"role": "user", "content": "2 + 3?"}]
            first = await ask(items, None)
            call = next(item for item in first.output if item.type == "function_call")
            assert json.loads(call.arguments) == {"a": 2, "b": 3}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            if chained:
                second = await ask([result], first.id)
            else:
                second = await ask([*items, *(item.to_dict() for item in first.output), result], None)
            assert second.output_text == "It is 5."
            assert second.usage.total_tokens > second.usage.output_tokens > 0
        require_one_sample(served, 2)

    serve(work, LOOP, "qwen3")


@pytest.mark.parametrize("streams", [False, True])
def test_messages_of_anthropics_client_with_a_tool(serve: Serve, streams: bool) -> None:
    tool: Any = {"name": "add", "description": "a + b", "input_schema": SCHEMA}

    async def work(served: Served) -> None:
        async with claude(served) as client:
            messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
            for _ in range(2):
                fields: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "system": "Add.", "tools": [tool]}
                if streams:
                    async with client.messages.stream(messages=messages, **fields) as stream:
                        message: Any = await stream.get_final_message()
                else:
                    message = await client.messages.create(messages=messages, **fields)
                messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
                uses = [block for block in message.content if block.type == "tool_use"]
                if uses:
                    assert message.stop_reason == "tool_use"
                    assert uses[0].input == {"a": 2, "b": 3}
                    result = {"type": "tool_result", "tool_use_id": uses[0].id, "content": "5"}
                    messages.append({"role": "user", "content": [result]})
            assert message.stop_reason == "end_turn"
            assert message.content[-1].text == "It is 5."
            assert message.usage.input_tokens > message.usage.output_tokens > 0
            counted = await client.messages.count_tokens(model=MODEL, messages=[messages[0]])
            assert counted.input_tokens > 5
        require_one_sample(served, 2)

    serve(work, LOOP, "qwen3")


@pytest.mark.parametrize(
    "arguments",
    [
        *("[1]", "[]", "null", "7", '""', '"no JSON"', '"{}"', r'"{\"a\": NaN}"', r'"{\"a\": 1e999}"'),
        *(r'"{\"a\": \"\\ud800\"}"', '{"arguments": "ls"}', '{"arguments": "[1]"}', '{"a": [1.0, -2.5, 1e20, 2]}'),
        *(f'{{"a": {"1234567890" * 2}}}', f'{{"a": -{"9" * 400}}}'),
    ],
)
@pytest.mark.parametrize("through_javascript", [False, True])
def test_an_anthropic_agent_that_returns_a_call_as_it_got_it_continues_its_sample(
    serve: Serve, arguments: str, through_javascript: bool
) -> None:
    """Arguments that are no object are shown as their text: to return that counted as rewriting the history."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "tools": [{"name": "add"}]}

    async def work(served: Served) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        answer = await served.http.post("/v1/messages", json={**body, "messages": messages})
        content = answer.json()["content"]
        if through_javascript:
            content = whole_numbers(content)
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "ok"}
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        assert (await served.http.post("/v1/messages", json={**body, "messages": messages})).status_code == 200
        require_one_sample(served, 2)
        content[0]["input"] = {"a": 3}
        assert (await served.http.post("/v1/messages", json={**body, "messages": messages})).status_code == 200
        assert served.session.history.rewrites == 1

    serve(work, [f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>', "Done.", "Done."])


def test_a_call_with_empty_arguments_that_an_agent_returns_continues_its_sample(serve: Serve) -> None:
    """The agent got arguments that are no JSON, and to return them counted as rewriting the history."""

    async def work(served: Served) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        said = (await served.chat(messages, tools=[ADD])).json()["choices"][0]["message"]
        (call,) = said["tool_calls"]
        assert call["function"]["arguments"] == "{}"
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
        await served.chat(messages, tools=[ADD])
        require_one_sample(served, 2)

    serve(work, ['<tool_call>{"name": "add", "arguments": ""}</tool_call>', "Done."], "qwen3")


def whole_numbers(value: Any) -> Any:
    """As JavaScript writes what it has read."""
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case int() if abs(value) < 10**300:
            return int(format(Decimal(repr(float(value))), "f").partition(".")[0])
        case dict():
            return {name: whole_numbers(one) for name, one in value.items()}
        case list():
            return [whole_numbers(one) for one in value]
    return value


def test_messages_stream_the_events_that_anthropic_documents(serve: Serve) -> None:
    async def work(served: Served) -> None:
        body = {"model": MODEL, "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        answer = await served.http.post("/v1/messages", json=body)
        assert answer.headers["content-type"] == "text/event-stream"
        names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        assert names == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]

    serve(work, ["Hello."])


def test_logprobs_are_those_that_are_recorded(serve: Serve) -> None:
    async def work(served: Served) -> None:
        async with open_ai(served) as client:
            completion = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True
            )
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        told = logprobs.content or []
        assert "".join(token.token for token in told) == "Hello.<|im_end|>"
        (sample,) = served.session.history.samples()
        assert [token.logprob for token in told] == pytest.approx(sample.logprobs[sample.policy_mask].tolist())

    serve(work, ["Hello."])


def test_a_stop_string_is_cut_off_for_the_agent_and_kept_in_the_record(serve: Serve) -> None:
    async def work(served: Served) -> None:
        choice = (await served.chat([{"role": "user", "content": "Hi"}], stop="END")).json()["choices"][0]
        assert choice["message"]["content"] == "Hello"
        assert served.client.sampling[0].stop == ("END",)
        messages = [{"role": "user", "content": "Hi"}, choice["message"], {"role": "user", "content": "More"}]
        await served.chat(messages)
        require_one_sample(served, 2)
        assert served.session.history.records[0].answer.raw == "Hello END"

    serve(work, ["Hello END"])


def test_in_a_run_the_agent_cannot_change_how_is_sampled_but_may_ask_for_less(serve: Serve) -> None:
    ruled = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=30, stop=("</sh>",), seed=7)

    async def work(served: Served) -> None:
        await served.chat([{"role": "user", "content": "Hi"}], temperature=0, max_tokens=12, stop=["END"], n=2)
        await served.chat([{"role": "user", "content": "Hi"}])
        first, second, third = served.client.sampling
        assert (first.temperature, first.top_p, first.max_new_tokens) == (0.8, 0.9, 12)
        assert first.stop == ("</sh>", "END")
        assert len({first.seed, second.seed, third.seed}) == 3, "an agent that asks again would get the same answer"

    serve(work, ["Hello."], settings=SessionSettings(ruled))


def test_several_answers_of_one_request_share_no_seed_with_a_request_of_the_next_seed(serve: Serve) -> None:
    async def work(served: Served) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        await served.chat(messages, seed=7, n=3)
        await served.chat(messages, seed=8, n=3)
        seeds = [sampling.seed for sampling in served.client.sampling]
        assert seeds[0] == 7, "one answer is what it would be alone"
        assert len(set(seeds)) == 6

    serve(work, ["Hello."])


def test_a_template_without_tools_has_them_described_and_results_shown(serve: Serve) -> None:
    async def work(served: Served) -> None:
        messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 3?"}]
        message = (await served.chat(messages, tools=[ADD])).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "add"
        messages += [message, {"role": "tool", "tool_call_id": "1", "content": "5"}]
        await served.chat(messages, tools=[ADD])
        (sample,) = served.session.history.samples()
        text = "".join(str(m) for m in (await served.http.get("/v1/models")).json()["data"])
        assert MODEL in text
        shown = served.client._tokenizer.decode(sample.token_ids)
        assert '{"name": "add"' in shown.split("Be kind.")[1].split("2 + 3?")[0] or '"add"' in shown
        assert "<tool_response>\n5\n</tool_response>" in shown

    serve(work, [CALL, "It is 5."])


def test_text_that_looks_like_a_call_and_is_none_stays_text(serve: Serve) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 2,\n</tool_call>'

    async def work(served: Served) -> None:
        choice = (await served.chat([{"role": "user", "content": "2 + 3?"}], tools=[ADD])).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == broken
        assert "tool_calls" not in choice["message"]

    serve(work, [broken])
