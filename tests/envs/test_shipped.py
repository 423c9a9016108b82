"""The shipped environments: always solvable, hard to fool, held-out tasks apart from training tasks."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import random
from typing import Any

import gymnasium
import pytest

from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.registration import make_env
from roll_flash.envs.shipped.file_quest import FileQuest, compare
from roll_flash.envs.shipped.file_quest_steps import draw_quest
from roll_flash.envs.shipped.gym_text import GymText, in_words
from roll_flash.envs.shipped.python_repair import PythonRepair
from roll_flash.envs.shipped.repair_bugs import broken_versions, draw_bug, make_repair, outcome
from roll_flash.envs.shipped.repair_programs import DRAWERS
from roll_flash.envs.shipped.sokoban_level import TextSokoban, draw_level, solve
from roll_flash.envs.shipped.text_game import parse_moves
from roll_flash.errors import ConfigError, EnvError
from roll_flash.sandboxes import SandboxHostError, SandboxSpec, open_sandbox

Steps = list[tuple[str, float, bool, dict[str, Any]]]


def play(env: Any, seed: int, *actions: str) -> Steps:
    """In a real sandbox."""

    async def run() -> Steps:
        steps = []
        async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
            await env.reset(seed=seed)
            for action in actions:
                observation, reward, terminated, _, info = await env.step(action)
                text = observation if isinstance(observation, str) else observation[0]["content"]
                steps.append((text, reward, terminated, info))
        return steps

    return asyncio.run(run())


def test_moves_are_read_from_tags_or_from_text_that_is_nothing_else() -> None:
    words = ("left", "down", "right", "up")
    assert parse_moves("I think left is bad. <move>Right, down -> up</move>", words) == [2, 1, 3]
    assert parse_moves("right down.", words) == [2, 1]
    assert parse_moves("<think>left</think> up", words) == [3]
    for text in ("go left", "", "<move></move>", "<move>jump</move>"):
        assert parse_moves(text, words) is None


def test_every_sokoban_level_is_solved_by_its_solver_within_the_moves_asked_for() -> None:
    for seed in range(30):
        level = draw_level(random.Random(seed), 6, 1 + seed % 2, (3, 14))
        moves = solve(level)
        assert moves is not None
        assert 3 <= len(moves) <= 14
        for move in moves:
            following = level.after(move)
            assert following is not None
            level = following
        assert level.is_solved


def test_a_sokoban_box_is_neither_pulled_nor_pushed_through_a_wall() -> None:
    env = TextSokoban(size=5, moves_per_turn=1, max_turns=100)
    env.reset(seed=5)
    for _ in range(60):
        before = env.level
        env.step(f"<move>{random.Random(len(str(before))).choice(env.words)}</move>")
        assert env.level.floor == before.floor
        assert env.level.boxes <= env.level.floor
        assert len(env.level.boxes) == 1


def test_a_quest_is_described_by_what_its_commands_do() -> None:
    for seed in range(5):
        quest = draw_quest(random.Random(seed), 8)
        assert quest.before != quest.after
        env = FileQuest(steps=8, max_turns=12)

        async def run(env: FileQuest = env, seed: int = seed) -> float:
            async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
                await env.reset(seed=seed)
                reward = 0.0
                while True:
                    _, reward, terminated, truncated, _ = await env.step(await env.oracle())
                    if terminated or truncated:
                        return reward

        assert asyncio.run(run()) == 1.0


def test_a_quest_pays_for_the_final_state_only() -> None:
    before, after = {"a": "1\n", "b": "2\n"}, {"a": "1\n", "c": "2\n", "d": "3\n"}
    assert compare(before, after, after) == 1.0
    assert compare(before, after, {"a": "1", "c": "2", "d": "3"}) == 1.0
    assert compare(before, after, before) == 0.0
    assert compare(before, after, {"a": "1\n", "c": "2\n"}) == pytest.approx(0.5 * 2 / 3)
    assert compare(before, after, {**after, "junk": ""}) == 0.5
    assert compare(before, after, {"c": "2\n", "d": "3\n"}) == 0.0
    assert compare(before, after, {}) == 0.0


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf ./*",
        "for i in $(seq 400); do : > f$i; done",
        "ln -s /etc/passwd link",
        "mkfifo pipe",
        "chmod 000 .",
        "head -c 3000000 /dev/zero > big",
        "for i in $(seq 19); do mkdir $(printf %0240d $i); cd 0*; done",
        "for i in $(seq 16); do mkdir $(printf %0250d $i); cd 0*; done; : > $(printf %070d 1)",
        "setsid sh -c 'while :; do mv a b; mv b a; done' >/dev/null 2>&1 & : > a",
    ],
)
def test_a_state_that_is_wrong_or_cannot_be_read_earns_nothing_and_is_no_error(command: str) -> None:
    *_, (_, reward, terminated, info) = play(FileQuest(), 3, f"<sh>{command}</sh>", "<answer>done</answer>")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_a_full_disk_of_this_machine_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files could not be copied here, which was taken for what the model had done: a solved quest earned 0."""
    open_file = os.open

    def full(path: Any, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if dir_fd is not None and flags & os.O_EXCL:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(SandboxHostError, match="cannot be written: No space left on device"):
        play(FileQuest(), 3, "<sh>true</sh>", "<answer>done</answer>")


def test_every_program_has_bugs_that_end_and_can_be_seen() -> None:
    chance = random.Random(0)
    for function, draw in DRAWERS.items():
        assert len(broken_versions(function)) >= 2, function.__name__
        assert not any(outcome(function, draw(chance)).startswith("raises") for _ in range(20))
    for seed in range(400):
        repair = make_repair(draw_bug(random.Random(seed)), chance)
        assert 0 < len(repair.arguments) - repair.passing <= len(repair.expected) == len(repair.arguments)
        assert repair.broken != repair.right
        assert len(set(repair.expected)) > 1, "a program that always returns the same is not right"


def test_a_repair_is_checked_by_tests_that_never_enter_the_sandbox() -> None:
    """The program looks for its tests everywhere while it is graded, and finds inputs but no expected value."""
    spy = (
        "import sys, os, glob\n"
        "def peek(*a):\n"
        "    frame = sys._getframe()\n"
        "    while frame: seen = str(frame.f_globals) + str(frame.f_locals); frame = frame.f_back\n"
        "    lines = [open(name).read() for name in glob.glob('/proc/[0-9]*/cmdline')]\n"
        "    open('/tmp/seen', 'a').write(seen + str(lines))\n"
    )

    async def run() -> tuple[float, str, tuple[str, ...]]:
        env = PythonRepair()
        async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
            await env.reset(seed=11)
            repair = env._task
            await env.step(f"<write>{spy}{repair.name} = peek\n</write>")
            _, reward, _, _, _ = await env.step("<answer>done</answer>")
            return reward, (await env.sandbox.read("/tmp/seen")).decode(), repair.expected

    reward, seen, expected = asyncio.run(run())
    assert reward == 0.0
    assert repr(list(expected)) not in seen
    assert repr(tuple(expected)) not in seen


def test_a_program_that_counts_its_calls_does_not_know_which_tests_fail() -> None:
    """Those that the broken program fails came first: with the first answers turned round, a yes or no was right."""

    async def earned(seed: int) -> float | None:
        env = PythonRepair()
        await env.reset(seed=seed)
        repair = env._task
        if repair.name not in ("is_palindrome", "balanced") or not repair.passing:
            return None
        wrong = len(repair.expected) - repair.passing
        counting = (
            f"broken, calls = {repair.name}, iter(range({len(repair.expected)}))\n"
            f"def {repair.name}(*a): return broken(*a) != (next(calls) < {wrong})\n"
        )
        async with open_sandbox(SandboxSpec(), provider="local") as env.sandbox:
            await env.step(f"<write>{repair.broken}{counting}</write>")
            return float((await env.step("<answer>done</answer>"))[1])

    found = [reward for seed in range(30) if (reward := asyncio.run(earned(seed))) is not None]
    assert len(found) > 2
    assert max(found) < 1.0


@pytest.mark.parametrize(
    "program", ["", "while True: pass", "raise SystemExit", "def nothing(): pass", "print('x' * 10**8)"]
)
def test_a_program_that_does_not_work_earns_nothing_and_is_no_error(program: str) -> None:
    env = PythonRepair(command_timeout_s=1)
    *_, (_, reward, terminated, _) = play(env, 2, f"<write> {program}</write>", "<answer>done</answer>")
    assert (reward, terminated) == (0.0, True)


@pytest.mark.parametrize("env_id", ["FileQuest-v0", "PythonRepair-v0", "TextFrozenLake-v0", "TextSokoban-v0"])
def test_no_held_out_task_is_a_training_task(env_id: str) -> None:
    async def prompts(first: int) -> set[str]:
        env: Any = make_env(env_id)
        found = set()
        for seed in range(first, first + 60):
            returned = env.reset(seed=seed)
            found.add(repr(returned[0] if isinstance(returned, tuple) else (await returned)[0]))
        return found

    training, held_out = asyncio.run(prompts(0)), asyncio.run(prompts(HELD_OUT_SEEDS))
    assert training.isdisjoint(held_out)
    assert len(training) > 20


@pytest.mark.parametrize(
    ("env_id", "kwargs", "seed"),
    [
        ("ShellMath-v0", {"largest": 3}, HELD_OUT_SEEDS),
        ("TextSokoban-v0", {"size": 5, "least_moves": 60, "most_moves": 70}, 0),
    ],
)
def test_a_task_without_a_problem_is_an_error_and_holds_up_no_worker(
    env_id: str, kwargs: dict[str, Any], seed: int
) -> None:
    """None of 2+2, 2+3, ..., 3*3 is held out, so that the first evaluation looked for one for ever."""

    async def reset() -> None:
        returned = make_env(env_id, **kwargs).reset(seed=seed)
        if inspect.isawaitable(returned):
            await returned

    with pytest.raises(EnvError, match=r"none of 10,000 problems is held out|1000 floors of size 5 have no level"):
        asyncio.run(reset())


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [("CliffWalking-v1", {}), ("FrozenLake-v1", {"is_slippery": False, "map_name": "8x8"}), ("Taxi", {})],
)
def test_any_small_gymnasium_environment_is_played_in_words_to_its_best_end(
    env_id: str, kwargs: dict[str, Any]
) -> None:
    env = GymText(env_id, kwargs, max_turns=50)
    observation, _ = env.reset(seed=4)
    assert "\x1b" not in observation
    total, is_over, info = 0.0, False, {}
    while not is_over:
        observation, reward, is_over, truncated, info = env.step(env.oracle())
        assert not truncated
        total += reward
    assert info["success"] is True
    assert total == pytest.approx(env.full_reward)


@pytest.mark.parametrize("lazy", ["gibberish", "<move>left</move>", "the run ends it"])
def test_a_game_in_which_each_move_costs_is_worth_most_when_it_is_won(lazy: str) -> None:
    """To make no moves would be worth 0, and the best way through -13."""
    env = GymText("CliffWalking-v1", max_turns=5)
    env.reset(seed=4)
    total = sum(env.step(lazy)[1] for _ in range(5)) if lazy != "the run ends it" else env.conclude()[0]
    assert total == -25.0
    assert env.full_reward == -13.0
    assert GymText("CliffWalking-v1", move_cost=0.0).conclude()[0] == 0.0
    assert GymText("CartPole-v1").conclude()[0] == 0.0


def test_a_game_of_blackjack_that_is_not_played_is_lost() -> None:
    """To make no moves would be worth 0, and the best moves -0.05 on average."""
    env = GymText("Blackjack-v1", max_turns=2)
    env.reset(seed=4)
    assert sum(env.step("gibberish")[1] for _ in range(2)) == env.conclude()[0] == -1.0
    assert GymText("Blackjack-v1", cut_off=0.5).conclude()[0] == 0.5


@pytest.mark.parametrize(("env_id", "success"), [("Blackjack-v1", None), ("MountainCar-v0", False)])
def test_a_game_that_is_cut_off_is_a_failure_only_if_its_end_tells_success(env_id: str, success: bool | None) -> None:
    """Else the failures of those that were cut off would be all that is known of success."""
    env = GymText(env_id, max_turns=1)
    env.reset(seed=4)
    assert env.conclude()[1].get("success") is success
    assert env.step("gibberish")[4].get("success") is success


def test_an_environment_of_numbers_is_shown_in_words() -> None:
    env = GymText("CartPole-v1", max_turns=2)
    observation, _ = env.reset(seed=0)
    assert "Moves: left, right" in observation
    assert observation.rstrip().endswith("]")
    assert not hasattr(env, "oracle")
    assert env.step("<move>left right</move>")[1] == 2.0
    spaces = gymnasium.spaces
    nested = spaces.Dict(
        {"card": spaces.Discrete(3, start=1), "pair": spaces.Tuple([spaces.Text(9), spaces.Discrete(2)])}
    )
    assert in_words({"card": 2, "pair": ("ace", 0)}, nested) == "card: 2 of 1..3\npair: ace, 0 of 0..1"


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"env_id": "Pendulum-v1"}, "only discrete actions"),
        ({"env_id": "NoSuch-v0"}, "NoSuch"),
        ({"env_id": "CartPole-v1", "words": ["left"]}, "has 2 actions, but words has 1"),
    ],
)
def test_what_cannot_be_rendered_as_text_says_why(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GymText(**kwargs)
