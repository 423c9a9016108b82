"""`envs check` passes what is fit to train on, and says what is wrong with what is not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from roll_flash.cli.main import main
from roll_flash.envs import Env, TextSpace
from roll_flash.envs.base import StepResult
from roll_flash.envs.check import leftovers as left_behind
from roll_flash.envs.check.checks import EnvReport, check_environment
from roll_flash.envs.registration import SHIPPED, register_env
from roll_flash.errors import ConfigError
from roll_flash.processes.supervise import semaphore_prefix


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check looks for files in the working folder and in shared memory, where other work may be going on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(left_behind, "SHARED_MEMORY", tmp_path_factory.mktemp("shm"))
    monkeypatch.setattr(left_behind, "SETTLE_S", 0.5)
    stop.clear()


@pytest.mark.docker
@pytest.mark.parametrize("env_id", sorted(SHIPPED))
def test_every_shipped_environment_is_fit_to_train_on(env_id: str) -> None:
    report = check_environment(env_id, provider="docker", seeds=2)
    assert report.ok, report.as_table()
    assert not [check for check in report.checks if check.status == "skip"], report.as_table()


class Good(Env):
    """Fit to train on; each of the others breaks one thing."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.number = (seed or 0) % 7
        return f"Say {self.number}", {}

    async def step(self, action: str) -> StepResult:
        right = action == str(self.number)
        return "", float(right), True, False, {"success": right}

    async def oracle(self) -> str:
        return str(self.number)


class PaysForNothing(Good):
    async def step(self, action: str) -> StepResult:
        return "", 1.0, True, False, {}


class CannotBeSolved(Good):
    async def step(self, action: str) -> StepResult:
        return "", 0.0, True, False, {}


class TellsTheTime(Good):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        await super().reset(seed=seed)
        return f"It is {time.time_ns()}", {}


class RaisesOnLongText(Good):
    async def step(self, action: str) -> StepResult:
        if len(action) > 10_000:
            raise MemoryError("too long")
        return await super().step(action)


class RaisesOnOddText(Good):
    async def step(self, action: str) -> StepResult:
        action.encode("ascii")
        return await super().step(action)


class PaysTooMuch(Good):
    async def step(self, action: str) -> StepResult:
        observation, reward, *rest = await super().step(action)
        return observation, 5 * reward, *rest  # type: ignore[return-value]


class ReturnsFour(Good):
    async def step(self, action: str) -> StepResult:
        return (await super().step(action))[:4]  # type: ignore[return-value]


class ReturnsNumbers(Good):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        await super().reset(seed=seed)
        return [1.0, 2.0], {}


class LeavesAProcess(Good):
    async def step(self, action: str) -> StepResult:
        children.append(subprocess.Popen(["sleep", "60"]))  # noqa: ASYNC220
        return await super().step(action)


class LeavesAThread(Good):
    async def step(self, action: str) -> StepResult:
        threading.Thread(target=stop.wait, name="left", daemon=True).start()
        return await super().step(action)


class LeavesAFile(Good):
    async def step(self, action: str) -> StepResult:
        Path("left.txt").write_text(action)  # noqa: ASYNC240
        return await super().step(action)


class LeavesSharedMemory(Good):
    async def step(self, action: str) -> StepResult:
        (left_behind.SHARED_MEMORY / f"left-{len(list(left_behind.SHARED_MEMORY.iterdir()))}").write_bytes(b"x")
        return await super().step(action)


class LeavesAnOrphan(Good):
    async def step(self, action: str) -> StepResult:
        said = subprocess.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)  # noqa: ASYNC221
        orphans.append(int(said.stdout))
        return await super().step(action)


class AlwaysSucceeds(Good):
    async def step(self, action: str) -> StepResult:
        observation, reward, *rest, _ = await super().step(action)
        return observation, reward, *rest, {"success": True}  # type: ignore[return-value]


class SendsAPicture(Good):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        await super().reset(seed=seed)
        return [{"role": "user", "content": [{"type": "image", "image": "..."}]}], {}


class NeverEnds(Good):
    async def step(self, action: str) -> StepResult:
        return "again", 0.0, False, False, {}


children: list[subprocess.Popen[bytes]] = []
orphans: list[int] = []
stop = threading.Event()


def check(env_type: type[Env], **options: Any) -> EnvReport:
    id = f"{env_type.__name__}-v0"
    if id not in gymnasium.registry:
        register_env(id, env_type)
    return check_environment(id, seeds=3, **options)


def test_a_good_environment_passes_every_check() -> None:
    report = check(Good)
    assert report.ok, report.as_table()
    assert {check.status for check in report.checks} == {"pass"}


@pytest.mark.parametrize(
    ("env_type", "question", "says"),
    [
        (PaysForNothing, "doing nothing earns nothing", "earns 1 -> this can be hacked"),
        (CannotBeSolved, "the oracle earns the full reward", "0 of 1"),
        (NeverEnds, "the oracle earns the full reward", "no end after 64 turns"),
        (TellsTheTime, "same seed and actions, same episode", "differs -> draw everything from"),
        (RaisesOnLongText, "bears a talkative agent", "MemoryError: too long"),
        (RaisesOnOddText, "bears malformed text", "UnicodeEncodeError"),
        (PaysTooMuch, "no episode earns more than the full reward", "0 to 5, full is 1 -> set full_reward"),
        (ReturnsFour, "keeps gymnasium's contract", "step returned 4 values"),
        (ReturnsNumbers, "keeps gymnasium's contract", "a str or a list of messages with roles"),
        (LeavesAProcess, "leaves nothing behind", "process sleep"),
        (LeavesAThread, "leaves nothing behind", "thread left"),
        (LeavesAFile, "leaves nothing behind", "left.txt"),
        (LeavesSharedMemory, "leaves nothing behind", "left-0"),
        (LeavesAnOrphan, "leaves nothing behind", "process sleep"),
        (AlwaysSucceeds, "doing nothing earns nothing", "earns 0 and succeeds -> info"),
        (SendsAPicture, "keeps gymnasium's contract", "only text can be played"),
    ],
)
def test_what_is_wrong_is_found_and_what_to_do_is_said(env_type: type[Env], question: str, says: str) -> None:
    try:
        report = check(env_type)
    finally:
        stop.set()
        while children:
            child = children.pop()
            child.kill()
            child.wait()
        while orphans:
            os.kill(orphans.pop(), signal.SIGKILL)
    failed = {check.name: check for check in report.checks if check.status == "fail"}
    assert question in failed, report.as_table()
    assert says in report.as_table()
    assert not report.ok


def test_a_slow_environment_is_not_played_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roll_flash.envs.check.checks.SAID_EVERY_S", 0.0)
    check_environment("TextFrozenLake-v0", {"size": 3}, seeds=2)
    assert "1 episodes played, a step takes up to 0.0 s" in capsys.readouterr().err


class Blocks(Env):
    """Steps that hold up the event loop of a worker."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return f"Say {seed}.", {}

    def step(self, action: str) -> Any:
        time.sleep(0.03)
        return "", 0.0, True, False, {}


def test_a_step_that_blocks_and_is_no_coroutine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its episodes would be played one after another, and nothing said so."""
    monkeypatch.setattr("roll_flash.envs.check.checks.MAX_HELD_UP_MS", 20.0)
    register_env("Blocks-v0", Blocks)
    (check,) = [each for each in check_environment("Blocks-v0", seeds=2).checks if each.name == "steps in time"]
    assert check.status == "fail"
    assert "`step` is no `async def`" in check.detail
    monkeypatch.setattr("roll_flash.envs.check.checks.MAX_HELD_UP_MS", 2000.0)
    assert check_environment("Blocks-v0", seeds=2).checks[-2].status == "pass"


def test_an_environment_that_says_that_it_is_nondeterministic_need_not_repeat_itself() -> None:
    class Declared(TellsTheTime):
        nondeterministic = True

    report = check(Declared)
    assert report.ok, report.as_table()
    assert "registered as nondeterministic -> an interrupted episode begins again" in report.as_table()


def test_without_an_oracle_and_a_reward_nobody_can_say_that_it_is_fit() -> None:
    class Unpaid(Good):
        oracle = None  # type: ignore[assignment]

        async def step(self, action: str) -> StepResult:
            return "", 0.0, True, False, {}

    report = check(Unpaid)
    assert report.ok
    assert "no agent earned a reward: with an oracle() one can tell if it is fit to train on" in report.as_table()


def test_slow_calls_have_as_much_time_as_in_training() -> None:
    class Slow(Good):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            await asyncio.sleep(0.4)
            return await super().reset(seed=seed)

    assert check(Slow, timeout_s=1.0).checks[0].status == "pass"


class Plain(gymnasium.Env[Any, str]):
    """A plain environment of gymnasium."""

    observation_space: Any = TextSpace()
    action_space = TextSpace()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return "Say hello.", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


class SaysArrays(Plain):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}


class TakesNumbers(Plain):
    action_space = gymnasium.spaces.Discrete(4)  # type: ignore[assignment]


class HasNoBlanks(Plain):
    observation_space = gymnasium.spaces.Text(100)


@pytest.mark.parametrize(
    ("env_type", "says"),
    [
        (SaysArrays, "not ndarray; render it as text"),
        (TakesNumbers, "action_space is a Discrete space, but a model's actions are texts; read them in"),
        (HasNoBlanks, "observation_space is a Text space without a blank in its charset; roll_flash.TextSpace()"),
    ],
)
def test_a_plain_environment_without_text_is_told_the_way_out(env_type: type[Any], says: str) -> None:
    found = check(env_type).checks[0]
    assert found.status == "fail"
    assert says in found.detail


def test_what_plays_itself_is_not_called_unfit() -> None:
    class PlaysItself(Env):
        runs_own_loop = True

        async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return "", {}

    report = check(PlaysItself)
    assert report.ok
    assert "roll-flash eval --env PlaysItself-v0 --model tiny" in report.as_table()
    assert report.as_table().endswith("PlaysItself-v0: not known whether it is fit to train on")


def test_a_step_that_hangs_is_given_up() -> None:
    class Hangs(gymnasium.Env[str, str]):
        observation_space = action_space = TextSpace()

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return "hang", {}

        def step(self, action: str) -> Any:
            released.wait(60)

    released = threading.Event()
    register_env("Hangs-v0", Hangs)
    try:
        report = check_environment("Hangs-v0", seeds=2, timeout_s=0.1)
    finally:
        released.set()
        del gymnasium.registry["Hangs-v0"]
    assert not report.ok
    assert "took longer than 0.1 s" in report.as_table()
    assert "thread _gymnasiums_own_check" in report.as_table()


def test_the_command_says_pass_or_fail_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    check(Good)
    check(PaysForNothing)
    assert main(["envs", "check", "Good-v0", "--seeds", "2"]) == 0
    assert "Good-v0: fit to train on" in capsys.readouterr().out
    assert main(["envs", "check", "PaysForNothing-v0", "--seeds", "2", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert {check["status"] for check in found["checks"]} == {"pass", "fail"}


def test_arguments_of_the_environment_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "check", "TextFrozenLake-v0", "size=3", "max_turns=4", "--seeds", "2"]) == 0
    assert main(["envs", "check", "TextFrozenLake-v0", "size=1"]) == 2
    assert "size >= 2" in capsys.readouterr().err


def test_what_cannot_be_made_is_an_error_of_usage() -> None:
    with pytest.raises(ConfigError, match="not registered"):
        check_environment("NoSuch-v0")


def test_semaphores_of_another_run_on_this_machine_are_not_blamed_on_the_environment(tmp_path: Path) -> None:
    before = left_behind.Snapshot.take(tmp_path)
    for guard in (1, os.getpid()):
        (left_behind.SHARED_MEMORY / f"sem.{semaphore_prefix(guard)}-abc").write_bytes(b"x")
    (found,) = left_behind.Snapshot.take(tmp_path).since(before)
    assert found.endswith(f"sem.{semaphore_prefix(os.getpid())}-abc")
