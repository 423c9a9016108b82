"""What a session recorded is what the model was given and what it said: the learner scores it as the sampler did."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from conftest import Serve, Served
from scripted_model import END, TinyModel

from roll_flash.types import Branch

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = {
    "chatml": '<tool_call>\n{"name": "weather",  "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen3": "<think>\nwhich city?\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":"Rome"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city":   "Rome"}}',
}
STYLES = tuple(CALLS)


def require_no_drift(tiny: TinyModel, samples: list[Branch]) -> None:
    for sample in samples:
        rescored = np.concatenate([[0.0], tiny.logprobs(sample.token_ids.tolist())])
        assert np.abs(rescored - sample.logprobs)[sample.policy_mask].max() < 1e-3
        spans = np.zeros(len(sample.token_ids), bool)
        for turn in sample.turns:
            spans[turn.start : turn.end] = True
        assert (spans == sample.policy_mask).all()


@pytest.mark.parametrize("turns", [2, 3, 5])
@pytest.mark.parametrize("style", STYLES)
def test_plain_turns_are_one_sample_without_drift(serve: Serve, tiny: TinyModel, style: str, turns: int) -> None:
    texts = ["  It is 4. ", "<think>\nhard one\n</think>\n\nPerhaps 7?", "Sure:\n\n- a\n- b\n", "no", "done."]

    async def work(served: Served) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {turn}?"})
            message = (await served.chat(messages)).json()["choices"][0]["message"]
            messages.append({"role": "assistant", "content": message["content"]})
        samples = served.session.history.samples()
        assert len(samples) == 1
        assert len(samples[0].turns) == turns
        assert [turn.action for turn in samples[0].turns] == texts[:turns]
        require_no_drift(tiny, samples)

    serve(work, texts, style)


def test_no_text_of_a_tool_is_taken_for_the_models_own_turn(serve: Serve) -> None:
    """It was the placeholder of that turn, so that all after it in the prompt was shown again in each later turn."""

    async def work(served: Served) -> None:
        function = {**WEATHER["function"], "description": "[[an answer of the model]] once"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Rome?"}]
        message = (await served.chat(messages, tools=[{**WEATHER, "function": function}])).json()["choices"][0][
            "message"
        ]
        messages += [message, {"role": "user", "content": "And Paris?"}]
        await served.chat(messages, tools=[{**WEATHER, "function": function}])
        (sample,) = served.session.history.samples()
        assert served.client._tokenizer.decode(sample.token_ids).count("once") == 1

    serve(work, ["Warm.", "Cold."], "qwen3")


@pytest.mark.parametrize("style", STYLES)
def test_tool_calls_that_an_agent_parsed_and_wrote_anew_are_continued(
    serve: Serve, tiny: TinyModel, style: str
) -> None:
    """The agent's own JSON, ids and whitespace differ from what the model wrote; nothing was rewritten."""
    texts = [CALLS[style], CALLS[style], "It is sunny.", "Yes."]

    async def work(served: Served) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Rome?"},
        ]
        for turn in range(2):
            choice = (await served.chat(messages, tools=[WEATHER])).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            call = choice["message"]["tool_calls"][0]
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
            again = {"name": "weather", "arguments": json.dumps({"city": "Rome"}, indent=1)}
            messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"own-{turn}", "type": "function", "function": again}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": f"own-{turn}", "content": "sunny"})
        said = (await served.chat(messages, tools=[WEATHER])).json()["choices"][0]
        assert said["message"]["content"] == "It is sunny."
        messages += [said["message"], {"role": "user", "content": "Sure?"}]
        await served.chat(messages, tools=[WEATHER])
        samples = served.session.history.samples()
        assert len(samples) == 1
        assert len(samples[0].turns) == 4
        assert served.session.history.rewrites == served.session.history.forks == 0
        require_no_drift(tiny, samples)
        text = tiny.tokenizer(style).decode(samples[0].token_ids)
        assert text.count(CALLS[style]) == 2
        assert text.count("sunny") >= 2
        assert text.endswith(f"Yes.{END[style]}")

    serve(work, texts, style)


def test_thinking_that_a_template_strips_stays_as_it_was_sampled(serve: Serve, tiny: TinyModel) -> None:
    texts = ["<think>\nsecret\n</think>\n\nHello.", "Bye."]

    async def work(served: Served) -> None:
        first = (await served.chat([{"role": "user", "content": "Hi"}])).json()["choices"][0]["message"]
        assert first["content"] == "Hello."
        assert first["reasoning_content"] == "secret"
        await served.chat([{"role": "user", "content": "Hi"}, first, {"role": "user", "content": "And?"}])
        assert "secret" in tiny.tokenizer("qwen3").decode(served.client.prompts[1])
        require_no_drift(tiny, served.session.history.samples())

    serve(work, texts, "qwen3")


@pytest.mark.parametrize("style", STYLES)
def test_a_turn_that_was_cut_off_is_closed_and_continued(serve: Serve, tiny: TinyModel, style: str) -> None:
    async def work(served: Served) -> None:
        first = await served.chat([{"role": "user", "content": "Count"}], max_tokens=5)
        choice = first.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == "one t"
        messages = [{"role": "user", "content": "Count"}, choice["message"], {"role": "user", "content": "go on"}]
        await served.chat(messages)
        (sample,) = served.session.history.samples()
        require_no_drift(tiny, [sample])
        text = tiny.tokenizer(style).decode(sample.token_ids)
        assert f"one t{END[style]}" in text

    serve(work, ["one two three", "four"], style)


def test_a_history_that_was_rewritten_is_a_sample_of_its_own_and_counted(serve: Serve, tiny: TinyModel) -> None:
    async def work(served: Served) -> None:
        hello = {"role": "user", "content": "Hi"}
        first = (await served.chat([hello])).json()["choices"][0]["message"]
        await served.chat([hello, first, {"role": "user", "content": "More"}])
        await served.chat([{"role": "user", "content": "Summary of all so far"}])
        await served.chat([hello, first, {"role": "user", "content": "Other"}])
        history = served.session.history
        samples = history.samples()
        assert (history.rewrites, history.forks) == (1, 1)
        assert len(samples) == 3
        require_no_drift(tiny, samples)
        sampled = sum(len(text) + 1 for text in ("one", "two and more", "three", "four"))
        assert sum(int(sample.policy_mask.sum()) for sample in samples) == sampled
        fork = next(sample for sample in samples if sample.messages[-2]["content"] == "Other")
        assert len(fork.turns) == 1
        assert fork.prompt_length > samples[0].prompt_length

    serve(work, ["one", "two and more", "three", "four"])


def test_answers_side_by_side_are_branches_and_the_chosen_one_goes_on(serve: Serve, tiny: TinyModel) -> None:
    async def work(served: Served) -> None:
        hello = {"role": "user", "content": "Hi"}
        choices = (await served.chat([hello], n=3)).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["one", "two", "three"]
        await served.chat([hello, choices[1]["message"], {"role": "user", "content": "More"}])
        samples = served.session.history.samples()
        assert len(samples) == 3
        assert [turn.action for turn in samples[0].turns] == ["two", "four"]
        require_no_drift(tiny, samples)

    serve(work, ["one", "two", "three", "four"])


@pytest.mark.parametrize(("style", "opening"), [("qwen3", '<tool_call>\n{"name": "'), ("llama3", '{"name": "')])
def test_a_tool_call_that_is_required_is_begun_for_the_model(
    serve: Serve, tiny: TinyModel, style: str, opening: str
) -> None:
    argument = "arguments" if style == "qwen3" else "parameters"

    async def work(served: Served) -> None:
        asked = await served.chat([{"role": "user", "content": "Hi"}], tools=[WEATHER], tool_choice="required")
        choice = asked.json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert tiny.tokenizer(style).decode(served.client.prompts[0]).endswith(opening)
        answer = {"role": "tool", "tool_call_id": "x", "content": "sunny"}
        await served.chat([{"role": "user", "content": "Hi"}, choice["message"], answer], tools=[WEATHER])
        samples = served.session.history.samples()
        assert len(samples) == 1
        require_no_drift(tiny, samples)

    serve(work, [f'weather", "{argument}": {{"city": "Rome"}}}}', "Sunny."], style)
