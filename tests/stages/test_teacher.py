"""The stage that asks a teacher: its column is exact, and what is no answer is dropped and counted, never made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from roll_flash.chat.prompt_logprobs import read_prompt_logprobs
from roll_flash.chat.templates import chat_template_of
from roll_flash.chat.tokenizer import load_tokenizer
from roll_flash.config.sections.distill import DistillConfig
from roll_flash.config.sections.stages import StageConfig
from roll_flash.config.tree import load_config
from roll_flash.errors import ConfigError, InferenceError, ModelError, StreamError
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.json_lines import read_lines
from roll_flash.monitor.step_record import _teacher_metrics
from roll_flash.stages.running import open_stages, stage_consumers
from roll_flash.stages.same_tokenizer import check_same_tokenizer
from roll_flash.stages.teacher import Teacher
from roll_flash.stream import LearnerLoader, TrajectoryStream, finished_group
from roll_flash.system import start_checks
from roll_flash.types import FinishedEpisode, FinishedGroup, Group, Trajectory, Turn

from .teachers import Asked, Say, honest, logprob_of, teaching, with_logprob
from .test_stages import TASK, group, stage, trajectory

BASE: dict[str, Any] = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0"}]}


def config_of(url: str, **settings: Any) -> DistillConfig:
    defaults: dict[str, Any] = {"timeout_s": 5, "retries": 0, "max_failures_in_a_row": 100}
    return DistillConfig.model_validate({"teacher": {"base_url": url}} | defaults | settings)


async def trained(
    asked: Asked, groups: list[Group], log: Path, stages: list[StageConfig], tokenizer: Any, **settings: Any
) -> tuple[dict[str, FinishedEpisode], dict[str, float]]:
    """Episodes that reach the learner, by id, and the stream's books with the stages' figures."""

    async def source() -> AsyncIterator[list[FinishedGroup]]:
        for one in map(finished_group, groups):
            for member in one.trajectories:
                stream.put(member.episode_id, one.group_id, member, {})
            stream.complete(one.group_id)
            yield [one]

    found: dict[str, FinishedEpisode] = {}
    teacher = Teacher(config_of(asked.url, **settings), tokenizer)
    if asked.tokenizer is not None:
        await teacher.check()
    stream = TrajectoryStream(stage_consumers(stages, has_teacher=True))
    try:
        async with open_stages(stages, stream, log, teacher=teacher) as running:
            loader = LearnerLoader(stream, micro_batch_tokens=1000, timeout_s=20)
            async with aclosing(loader.stream_step(source())) as micro_batches:
                async for micro_batch in micro_batches:
                    found |= {each.episode_id: each for one in micro_batch for each in one.trajectories}
            return found, {**stream.counts(), **running.metrics(), "balanced": stream.metrics()["balanced"]}
    finally:
        await teacher.close()


def run(
    say: Say,
    groups: list[Group],
    tmp_path: Path,
    *,
    stages: tuple[StageConfig, ...] = (),
    tokenizer: Any = None,
    longest: int | None = None,
    **settings: Any,
) -> tuple[dict[str, FinishedEpisode], dict[str, float], Asked]:
    async def use() -> tuple[dict[str, FinishedEpisode], dict[str, float], Asked]:
        async with teaching(say, tokenizer, longest) as asked:
            log = tmp_path / "stages.jsonl"
            return *await trained(asked, groups, log, list(stages), tokenizer, **settings), asked

    return asyncio.run(use())


def with_logprobs(one: Group, *logprobs: float) -> Group:
    """Each trajectory of a group has the tokens 7, 8, 9, of which the last two are sampled, with these logprobs."""
    values = np.array([0.0, *logprobs], np.float32)
    return replace(one, trajectories=tuple(replace(each, logprobs=values) for each in one.trajectories))


def only(victim: str, say: Say) -> Callable[[list[int]], Any]:
    """Tells one trajectory of a group from the others by its first token; see `marked`."""
    return lambda token_ids: say(token_ids) if token_ids[0] == int(victim) else honest(token_ids)


def marked(one: Group) -> Group:
    """The first token of a trajectory is the number of its replica."""
    return replace(
        one,
        trajectories=tuple(
            replace(each, token_ids=np.array([replica, 8, 9], np.int32))
            for replica, each in enumerate(one.trajectories)
        ),
    )


def test_the_column_is_the_log_ratio_of_teacher_and_sampler(tmp_path: Path) -> None:
    found, books, asked = run(honest, [with_logprobs(group("g"), -0.5, -1.5)], tmp_path)
    for episode in found.values():
        assert episode.teacher_log_ratios is not None
        expected = [logprob_of(8) - -0.5, logprob_of(9) - -1.5]
        assert episode.teacher_log_ratios.tolist() == pytest.approx(expected, abs=1e-6)
    assert asked.prompts == [[7, 8, 9]] * 3, "tokens as they were sampled, none tokenised again"
    assert all(body["model"] is None and body["prompt_logprobs"] == 0 for body in asked.bodies)
    assert [each.reward for each in found.values()] == [1.0, 2.0, 3.0], "rewards stay"
    assert (books["stages/teacher/rows"], books["balanced"], books["consumed"]) == (3, 1, 3)
    lines = list(read_lines(tmp_path / "stages.jsonl"))
    kl = -sum([logprob_of(8) - -0.5, logprob_of(9) - -1.5]) / 2
    assert [line["reverse_kl"] for line in lines] == pytest.approx([kl] * 3)


def test_rewards_of_stages_and_the_teachers_column_come_together(tmp_path: Path) -> None:
    found, _, _ = run(honest, [group("g")], tmp_path, stages=(stage(weight=10),))
    assert [each.reward for each in found.values()] == [6.0, 7.0, 8.0]
    assert all(each.teacher_log_ratios is not None for each in found.values())


@pytest.mark.parametrize("said", ["-Infinity", "-9999.0", "-1e308", "-50"])
def test_minus_infinity_of_a_teacher_is_limited_as_ratios_of_the_losses_are(tmp_path: Path, said: str) -> None:
    found, _, _ = run(with_logprob(said), [with_logprobs(group("g"), -0.5, -1.5)], tmp_path)
    for episode in found.values():
        assert episode.teacher_log_ratios is not None
        assert episode.teacher_log_ratios.tolist() == pytest.approx([logprob_of(8) + 0.5, -20.0], abs=1e-6)


def test_a_token_without_a_logprob_from_the_sampler_gets_nothing_from_the_teacher(tmp_path: Path) -> None:
    found, _, _ = run(honest, [with_logprobs(group("g"), -9999.0, -1.5)], tmp_path)
    for episode in found.values():
        assert episode.teacher_log_ratios is not None
        assert episode.teacher_log_ratios.tolist() == pytest.approx([0.0, logprob_of(9) + 1.5], abs=1e-6)
    kl = -(logprob_of(9) + 1.5)
    assert [line["reverse_kl"] for line in read_lines(tmp_path / "stages.jsonl")] == pytest.approx([kl] * 3)
    assert _teacher_metrics(list(found.values()))["distill/reverse_kl"] == pytest.approx(kl)


GARBAGE: dict[str, Say] = {
    "NaN": with_logprob("NaN"),
    "positive": with_logprob("0.5"),
    "text": with_logprob('"-0.5"'),
    "null": with_logprob("null"),
    "true": with_logprob("true"),
    "an object": with_logprob("{}"),
    "a huge number": with_logprob("1" + "0" * 400),
    "no JSON": lambda _: "<html>",
    "deep JSON": lambda _: "[" * 100_000,
    "empty": lambda _: {},
    "no choice": lambda _: {"choices": []},
    "null logprobs": lambda _: {"choices": [{"prompt_logprobs": None}]},
    "logprobs as text": lambda _: {"choices": [{"prompt_logprobs": "-0.5 -0.5"}]},
    "too few": lambda token_ids: honest(token_ids[:-1]),
    "too many": lambda token_ids: honest([*token_ids, 5]),
    "other tokens": lambda token_ids: honest([*token_ids[:-1], 55]),
    "refused": lambda _: web.Response(status=403, text="no"),
    "an error": lambda _: web.Response(status=400, text="bad"),
    "a redirect": lambda _: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"}),
    "late": lambda _: None,
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_answer_drops_the_trajectory_and_counts_it(tmp_path: Path, what: str) -> None:
    timeout_s = 3 if what == "late" else 30
    found, books, _ = run(only("1", GARBAGE[what]), [marked(group("g"))], tmp_path, timeout_s=timeout_s)
    assert sorted(found) == ["g-0", "g-2"]
    assert books["dropped_stage_teacher_failed"] == books["stages/teacher/failed_rows"] == 1
    assert books["balanced"] == 1
    errors = [line for line in read_lines(tmp_path / "stages.jsonl") if "error" in line]
    assert [line["episode_id"] for line in errors] == ["g-1"]
    assert all(0 < len(line["error"]) < 800 for line in errors)


def test_an_attempt_that_fails_is_repeated(tmp_path: Path) -> None:
    attempts: list[Any] = []

    def at_first_nonsense(token_ids: list[int]) -> Any:
        attempts.append(token_ids)
        return {} if len(attempts) == 1 else honest(token_ids)

    found, books, _ = run(at_first_nonsense, [group("g")], tmp_path, retries=1, workers=1)
    assert len(found) == 3
    assert (books["stages/teacher/retries"], len(attempts)) == (1, 4)


def test_a_teacher_that_fails_all_the_time_ends_the_run_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        StreamError, match=r"stage 'teacher' failed 2 times in a row.*no log-probabilities of the prompt"
    ):
        run(lambda _: {"choices": [{}]}, [group("g")], tmp_path, max_failures_in_a_row=2, workers=1)


def longer_by_one() -> Group:
    """A group of samples of three tokens, and one of four."""
    long = replace(trajectory("g", 3), token_ids=np.array([7, 5, 8, 9], np.int32), policy_mask=np.arange(4) > 1)
    long = replace(long, logprobs=np.zeros(4, np.float32), versions=np.array([-1, -1, 0, 0], np.int32))
    return replace(group("g"), trajectories=(*group("g").trajectories, long))


def test_what_a_teacher_refuses_as_too_long_is_dropped_at_once_with_its_own_reason(tmp_path: Path) -> None:
    refusal = web.Response(
        status=400, text='{"error": {"message": "This model\'s maximum context length is 4 tokens."}}'
    )
    found, books, asked = run(
        lambda token_ids: refusal if len(token_ids) > 3 else honest(token_ids), [longer_by_one()], tmp_path, retries=3
    )
    assert sorted(found) == ["g-0", "g-1", "g-2"]
    assert (books["dropped_teacher_too_long"], books["balanced"]) == (1, 1)
    assert [len(prompt) for prompt in asked.prompts].count(4) == 1


def test_a_sample_that_fills_the_teachers_context_keeps_its_reward(tmp_path: Path) -> None:
    """It was dropped: a model lost no reward by writing until its context was full."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    found, books, asked = run(honest, [longer_by_one()], tmp_path, tokenizer=tokenizer, longest=4)
    assert (found["g-3"].reward, books["balanced"]) == (1.0, 1)
    assert found["g-3"].teacher_log_ratios is not None
    assert found["g-3"].teacher_log_ratios.tolist() == pytest.approx([logprob_of(8), 0.0], abs=1e-6)
    assert sorted(asked.prompts) == [[7, 5, 8], *[[7, 8, 9]] * 3], "it needs room to sample a token"


# The tokenizer


def changed_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The tiny model's tokenizer with another `tokenizer.json`."""
    import json
    import shutil

    shutil.copytree(resolve_model("tiny"), folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    change(tree)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def swapped(tree: dict[str, Any]) -> None:
    words = tree["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def lowercase(tree: dict[str, Any]) -> None:
    tree["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("change", "message"),
    [(swapped, "the vocabulary of .* has other tokens than"), (lowercase, "makes other tokens of 'The quick brown")],
)
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    other = changed_tokenizer(tmp_path / "other", change)
    with pytest.raises(ConfigError, match=message) as refused:
        check_same_tokenizer(resolve_model("tiny"), other)
    assert "\n" not in str(refused.value)
    theirs = load_tokenizer(other)

    async def ask() -> None:
        async with teaching(honest, theirs) as asked:
            await Teacher(config_of(asked.url), load_tokenizer(resolve_model("tiny"))).check()

    with pytest.raises(ConfigError, match="other tokens"):
        asyncio.run(ask())


def test_the_same_tokenizer_in_another_folder_is_taken(tmp_path: Path) -> None:
    """Also with more rows in the embedding than tokens."""
    import json

    other = changed_tokenizer(tmp_path / "other", lambda _: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    check_same_tokenizer(resolve_model("tiny"), other)


def test_a_teacher_that_a_run_cannot_serve_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = changed_tokenizer(tmp_path / "other", swapped)
    tree: dict[str, Any] = {**BASE, "inference": {"engine": "transformers"}}
    config = load_config({**tree, "distill": {"teacher": {"model": str(other)}}})
    assert config.distill is not None
    with pytest.raises(ConfigError, match="has other tokens than the model of this run"):
        start_checks._check_teacher(config, config.distill.teacher, resolve_model("tiny"))
    missing = config.distill.teacher.model_copy(update={"model": str(tmp_path / "nothing")})
    with pytest.raises(ModelError, match="nothing"):
        start_checks._check_teacher(config, missing, resolve_model("tiny"))
    monkeypatch.setattr(start_checks, "computes_on_gpus", lambda _: True)
    with pytest.raises(ConfigError, match=r"on CPUs only; start `vllm serve`"):
        start_checks._check_teacher(config, config.distill.teacher, resolve_model("tiny"))


def test_the_recipe_takes_the_model_of_a_former_run_as_its_teacher() -> None:
    config = load_config(Path(__file__).parents[2] / "configs/recipes/distill.yaml")
    assert config.distill is not None
    assert (config.distill.teacher.model or "").endswith("runs/quickstart/model")
    assert config.distill.reward_weight == 0


@pytest.mark.parametrize("body", ['{"tokens": null}', "[]", "{}", '{"tokens": "text"}', "nonsense"])
def test_an_endpoint_that_cannot_tell_its_tokens_is_refused(body: str) -> None:
    async def tell(_: web.Request) -> web.Response:
        return web.Response(text=body)

    async def ask() -> None:
        app = web.Application()
        app.router.add_post("/tokenize", tell)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            await Teacher(config_of(url), load_tokenizer(resolve_model("tiny"))).check()
        finally:
            await runner.cleanup()

    with pytest.raises((ConfigError, InferenceError), match=r"distill\.teacher: "):
        asyncio.run(ask())


# A hint


def played(tokenizer: Any, name: str = "h-0", **fields: Any) -> Trajectory:
    """An episode of two turns as the chat template shows it."""
    template = chat_template_of(tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "6 * 7?"}]
    token_ids, mask, turns = template.prompt(messages), [], []
    mask += [False] * len(token_ids)
    for said, answer in (("41", "no"), ("42", "")):
        sampled = tokenizer.encode(said, add_special_tokens=False)
        turns.append(Turn(len(token_ids), len(token_ids) + len(sampled), said, answer, 0.0, "stop", 0.1, 0.1))
        token_ids += sampled
        mask += [True] * len(sampled)
        messages.append({"role": "assistant", "content": said})
        if answer:
            observation = template.delta([{"role": "user", "content": answer}], after=token_ids[-1])
            token_ids += observation
            mask += [False] * len(observation)
            messages.append({"role": "user", "content": answer})
    policy = np.array(mask)
    base = trajectory("h", 0)
    return replace(
        base,
        episode_id=name,
        token_ids=np.array(token_ids, np.int32),
        policy_mask=policy,
        logprobs=np.where(policy, -1.0, 0.0).astype(np.float32),
        versions=np.where(policy, 0, -1).astype(np.int32),
        turns=tuple(turns),
        messages=tuple(messages),
        prompt_length=int(np.argmax(policy)),
        **fields,
    )


def pair(first: Trajectory, tokenizer: Any) -> Group:
    others = (played(tokenizer, name, info={"answer": "42"}) for name in ("h-1", "h-2"))
    return Group("h", TASK, (first, *others))


@pytest.mark.parametrize("message", ["user", "system"])
def test_the_teacher_sees_the_hint_and_the_same_sampled_tokens(tmp_path: Path, message: str) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    whole = played(tokenizer, info={"answer": 42})
    hint = {"key": "answer", "text": "The answer is {hint}.", "message": message}
    found, _, asked = run(honest, [pair(whole, tokenizer)], tmp_path, hint=hint, tokenizer=tokenizer)
    shown = {
        "user": [{"role": "user", "content": "6 * 7?\n\nThe answer is 42."}],
        "system": [{"role": "system", "content": "The answer is 42."}, {"role": "user", "content": "6 * 7?"}],
    }[message]
    prompt = chat_template_of(tokenizer).prompt(shown)
    assert asked.prompts[0] == [*prompt, *whole.token_ids[whole.prompt_length :].tolist()]
    sampled = whole.token_ids[whole.policy_mask].tolist()
    log_ratios = found["h-0"].teacher_log_ratios
    assert log_ratios is not None
    assert log_ratios.tolist() == pytest.approx([logprob_of(token) + 1.0 for token in sampled], abs=1e-6)


def test_a_hint_may_be_an_argument_of_the_task(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    whole = played(tokenizer, task=replace(TASK, kwargs={"answer": "42"}))
    _, _, asked = run(honest, [pair(whole, tokenizer)], tmp_path, hint={"key": "answer"}, tokenizer=tokenizer)
    assert "6 * 7?\n\n42" in tokenizer.decode(asked.prompts[0])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "there is no hint 'answer' in the info or the task of h-0"),
        ({"messages": ()}, "without recorded messages"),
        (
            {"messages": ({"role": "user", "content": "other"}, *({"role": "assistant", "content": "42"},) * 2)},
            "makes another prompt of the recorded messages",
        ),
    ],
)
def test_a_trajectory_that_cannot_have_the_hint_is_dropped_with_the_reason(
    tmp_path: Path, fields: dict[str, Any], error: str
) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    whole = replace(played(tokenizer, info={"answer": "42"} if fields else {}), **fields)
    found, books, _ = run(honest, [pair(whole, tokenizer)], tmp_path, hint={"key": "answer"}, tokenizer=tokenizer)
    assert sorted(found) == ["h-1", "h-2"]
    assert books["dropped_stage_teacher_failed"] == 1
    (line,) = [line for line in read_lines(tmp_path / "stages.jsonl") if "error" in line]
    assert error in line["error"]


def test_a_hint_without_end_costs_no_more_than_the_teachers_context(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny"))
    whole = played(tokenizer, info={"answer": "4" * 5_000_000})
    hint = {"key": "answer"}
    found, books, _ = run(honest, [pair(whole, tokenizer)], tmp_path, hint=hint, tokenizer=tokenizer, longest=500)
    assert sorted(found) == ["h-1", "h-2"]
    assert books["dropped_teacher_too_long"] == 1


# The config


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"distill": {"teacher": {}}}, "name one teacher"),
        ({"distill": {"teacher": {"model": "tiny", "base_url": "http://a/v1"}}}, "name one teacher"),
        ({"distill": {"teacher": {"own_servers": True}}}, "own_servers needs a hint"),
        ({"distill": {"teacher": {"base_url": "http://a/v1", "servers": 2}}}, "servers is read only with model"),
        ({"distill": {"teacher": {"model": "tiny", "served_name": "x"}}}, "are read only with base_url"),
        ({"distill": {"teacher": {"model": "tiny"}, "hint": {"key": "a", "text": "b"}}}, "must contain {hint}"),
        ({"distill": {"teacher": {"model": "tiny"}}, "rollout": {"temperature": 0.7}}, "set rollout.temperature=1.0"),
        ({"distill": {"teacher": {"model": "tiny"}}, "learner": {"advantage": "gae"}}, "computes its own from values"),
        (
            {"distill": {"teacher": {"model": "tiny"}}, "scheduler": {"drop_groups_without_signal": True}},
            "drop_groups_without_signal",
        ),
        (
            {"distill": {"teacher": {"model": "tiny"}}, "stages": [{"name": "teacher", "entry_point": "judge"}]},
            "the name teacher is taken",
        ),
        (
            {
                "distill": {"teacher": {"model": "tiny"}, "hint": {"key": "a"}},
                "model": {"path": "tiny", "thinking": "strip"},
            },
            "needs model.thinking=keep",
        ),
    ],
)
def test_settings_that_would_be_wrong_are_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**BASE, **tree})


def test_servers_of_the_run_have_room_for_the_hint_if_they_are_the_teacher() -> None:
    hint = {"key": "answer", "max_tokens": 100}
    plain = load_config({**BASE, "distill": {"teacher": {"model": "tiny"}, "hint": hint}})
    own = load_config({**BASE, "distill": {"teacher": {"own_servers": True}, "hint": hint}})
    assert (plain.served_length, own.served_length) == (1024, 1125)


def test_answers_are_read_as_the_servers_write_them() -> None:
    answer = {"prompt_logprobs": [None, {"5": {"logprob": -1}, "6": {"logprob": -9.0}}, {"7": {"logprob": -0.0}}]}
    assert read_prompt_logprobs(answer, [4, 5, 7]).tolist() == [-1.0, 0.0]
