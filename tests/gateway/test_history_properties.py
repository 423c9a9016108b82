"""Whatever an agent does with its history: what was sampled is kept as it was, once, and continued where it can be."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_model import END, ScriptedClient, TinyModel

from roll_flash.engines.inference import Generation
from roll_flash.gateway.model_call import Answer, ModelCall
from roll_flash.gateway.sessions.history import CallRecord, History
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.gateway.token_backend import TokenBackend

ANSWERS = ["yes", "no ", "<think>well</think>ok", "<tool_call>\n{}", ""]
TOOL: Any = {"type": "function", "function": {"name": "go", "description": "", "parameters": {"type": "object"}}}

moves = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "go back", "rewrite", "begin anew", "with a tool"]),
        st.integers(0, 5),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=8,
)


def test_further_answers_to_one_question_are_forks_and_no_rewritten_history(tiny: TinyModel) -> None:
    async def ask(*questions: ModelCall) -> tuple[int, int]:
        tokenizer = tiny.tokenizer("chatml")
        client = ScriptedClient(tiny, tokenizer, lambda number: f"answer {number}", END["chatml"])
        client.scores = False
        backend = TokenBackend(client, tokenizer, model="m", max_length=1000)
        session = Session("s", SessionSettings(), 30.0)
        for number, call in enumerate(questions):
            await backend.complete(call, session, number)
        return session.history.forks, session.history.rewrites

    hello: Any = ({"role": "user", "content": "Hi"},)
    other: Any = ({"role": "user", "content": "Ho"},)
    assert asyncio.run(ask(ModelCall(messages=hello, n=3))) == (2, 0)
    assert asyncio.run(ask(ModelCall(messages=hello), ModelCall(messages=hello))) == (1, 0)
    assert asyncio.run(ask(ModelCall(messages=hello), ModelCall(messages=other))) == (0, 1)


def test_an_agent_that_begins_anew_again_and_again_with_a_long_history_stalls_nobody() -> None:
    """Calls are recorded on the loop that serves all agents."""
    history = History()
    answer = Answer("a", "a", "", (), "stop", None, ())
    spent = 0.0
    for number in range(200):
        messages: Any = tuple({"role": "user", "content": str(at % 7)} for at in range(4000))
        messages = (*messages, {"role": "user", "content": str(number)})
        key = str(number // 2).encode()
        began = time.process_time()
        history.add(CallRecord(None, key, key + b"a", messages, [], None, answer, 1, 1, 0.0, 0.0))
        spent += time.process_time() - began
    assert spent < 1.0
    assert (history.forks, history.rewrites) == (100, 99)
    history.discard(history.records[0])
    history.discard(history.records[0])
    history.add(CallRecord(None, b"0", b"0a", (), [], None, answer, 1, 1, 0.0, 0.0))
    assert (history.forks, history.rewrites) == (100, 100), "nobody was told the answers before"


def test_samples_have_the_experts_of_their_calls_and_each_call_asks_for_those_after_its_parents() -> None:
    def sampled(tokens: int, experts: list[int]) -> Generation:
        floats, integers = np.zeros(tokens, np.float32), np.arange(tokens, dtype=np.int32)
        rows = np.array(experts, np.int16).reshape(-1, 1, 1)
        return Generation(integers, floats, integers, "stop", "here", 0.0, rows)

    def call(parent: CallRecord | None, given: list[int], generation: Generation) -> CallRecord:
        answer = Answer("a", "a", "", (), "stop", None, ())
        return CallRecord(parent, b"", b"", (), given, generation, answer, 1, 2, 0.0, 0.0)

    first = call(None, [1, 2], sampled(2, [10, 11, 12]))
    assert first.known_experts() == 3
    second, fork = call(first, [3], sampled(2, [13, 14, 15])), call(first, [4, 5], sampled(1, [16, 17, 18]))
    assert (second.known_experts(), fork.known_experts()) == (6, 6)
    history = History()
    for record in (first, second, fork):
        history.add(record)
    found = [sample.routed_experts for sample in history.samples()]
    assert [None if each is None else each[:, 0, 0].tolist() for each in found] == [
        [10, 11, 12, 13, 14, 15, -1],
        [10, 11, 12, 16, 17, 18, -1],
    ]


def next_messages(move: str, pick: int, messages: list[Any]) -> list[Any]:
    """What the agent sends next, being at `messages` (which end with an answer, or are empty)."""
    news = {"role": "user", "content": f"news {pick}"}
    match move:
        case "go back":
            kept = [place + 1 for place, message in enumerate(messages) if message["role"] == "assistant"]
            return [*messages[: kept[pick % len(kept)] if kept else 0], news]
        case "rewrite" if messages:
            changed = {**messages[pick % len(messages)], "content": f"rewritten {pick}"}
            return [*messages[: pick % len(messages)], changed, *messages[pick % len(messages) + 1 :], news]
        case "begin anew":
            return [news]
    return [*messages, news]


@settings(max_examples=60)
@given(moves=moves, style=st.sampled_from(["chatml", "qwen3", "llama3"]))
def test_every_sampled_token_is_the_policys_once_and_prompts_continue_records(
    tiny: TinyModel, moves: list[tuple[str, int, int]], style: str
) -> None:
    asyncio.run(_play(tiny, moves, style))


async def _play(tiny: TinyModel, moves: list[tuple[str, int, int]], style: str) -> None:
    tokenizer = tiny.tokenizer(style)
    client = ScriptedClient(tiny, tokenizer, lambda number: ANSWERS[number % len(ANSWERS)], END[style])
    client.scores = False
    backend = TokenBackend(client, tokenizer, model="m", max_length=100_000)
    session = Session("s", SessionSettings(), 30.0)
    messages: list[Any] = []
    answered = 0
    for number, (move, pick, n) in enumerate(moves):
        sent = next_messages(move, pick, messages)
        tools = (TOOL,) if move == "with a tool" else ()
        call = ModelCall(messages=tuple(sent), tools=tools, n=n)
        before = len(session.history.records)
        reply, records = await backend.complete(call, session, number)
        answered += n
        assert len(session.history.records) == before + n
        parent = records[0].parent
        if parent is not None:
            known = parent.token_ids()
            assert client.prompts[-1][: len(known)] == known
        elif move == "append" and messages and not tools and moves[number - 1][0] != "with a tool":
            raise AssertionError("an agent that only appended was not continued")
        messages = [*sent, {"role": "assistant", "content": reply.answers[0].content}]
    _check(session, client, answered)


def _check(session: Session, client: ScriptedClient, answered: int) -> None:
    samples = session.history.samples()
    sampled = sum(record.completion_tokens for record in session.history.records)
    assert sum(int(sample.policy_mask.sum()) for sample in samples) == sampled
    assert sum(len(sample.turns) for sample in samples) == answered == len(client.prompts)
    prompts = {tuple(prompt) for prompt in client.prompts}
    for sample in samples:
        assert sample.policy_mask.any()
        assert sample.policy_mask[-1]
        assert not sample.policy_mask[0]
        assert sample.prompt_length == int(np.argmax(sample.policy_mask))
        for turn in sample.turns:
            assert tuple(sample.token_ids[: turn.start].tolist()) in prompts
