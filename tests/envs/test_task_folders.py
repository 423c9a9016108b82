"""Task folders of Harbor and terminal-bench: solved by their solution, not by doing nothing, not scored when broken."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from roll_flash.envs.adapters.task_folders import env as env_module
from roll_flash.envs.adapters.task_folders.env import COPIES_AT_ONCE, MARGIN_S, TaskFolder
from roll_flash.envs.adapters.task_folders.format import find_tasks, load_task
from roll_flash.envs.adapters.task_folders.tests import Verdict, copy_out, reward_of_json, reward_of_text
from roll_flash.envs.check.checks import check_environment
from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.errors import ConfigError, EnvError
from roll_flash.sandboxes import SandboxDied, SandboxError, SandboxHostError, SandboxPool, SandboxSpec, open_sandbox
from roll_flash.types import as_reward

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
ON_OUR_IMAGE = "FROM roll-flash-sandbox:latest\nUSER root\nWORKDIR /app\n"
GIVE_ONE = "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n"


def harbor_task(folder: Path, *, tests: str = GIVE_ONE, toml: str = "", dockerfile: str = ON_OUR_IMAGE) -> Path:
    files = {
        "task.toml": f'version = "1.0"\n{toml}',
        "instruction.md": "Do it.",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": tests,
    }
    return write(folder, files)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode())
    return folder


def play(folder: Path, *actions: str, seed: int = 0, **kwargs: Any) -> tuple[list[str], float, dict[str, Any]]:
    """What the model is told after each action, and the last reward and info. No action: the oracle's."""

    async def run() -> tuple[list[str], float, dict[str, Any]]:
        env = TaskFolder(folder, **kwargs)
        (messages, _), said = await env.reset(seed=seed), []
        assert messages[-1]["content"]
        async with SandboxPool(provider="docker", size=1, run="task-folders") as pool:
            lease = LazySandbox(pool, lambda: env.sandbox_spec or SandboxSpec())
            env.sandbox = lease
            try:
                for turn in range(len(actions) or 9):
                    action = actions[turn] if actions else await env.oracle()
                    observation, earned, terminated, _, info = await env.step(action)
                    said.append(
                        "".join(str(message["content"]) for message in observation if isinstance(message, dict))
                    )
                    if terminated:
                        break
            finally:
                await lease.close()
        return said, earned, info

    return asyncio.run(run())


@pytest.mark.docker
def test_the_examples_are_fit_to_train_on() -> None:
    """The solution earns 1, doing nothing earns 0, and nothing is left behind."""
    tasks = find_tasks(EXAMPLES)
    assert [task.name for task in tasks] == ["count-visitors", "repair-median", "tidy-downloads"]
    report = check_environment(
        "TaskFolder-v0", {"folder": str(EXAMPLES)}, seeds=len(tasks), provider="docker", timeout_s=120
    )
    assert report.ok, report.as_table()


@pytest.mark.docker
def test_a_part_of_the_work_earns_a_part_of_the_reward() -> None:
    """And of a reward.json with several numbers the one is taken that was asked for."""
    delete = "<sh>find downloads -empty -delete</sh>"
    _, earned, info = play(EXAMPLES / "tidy-downloads", delete, "<answer>done</answer>")
    assert (earned, info["success"], info["task"]) == (0.3333, False, "tidy-downloads")
    _, earned, _ = play(EXAMPLES / "tidy-downloads", delete, "<answer>done</answer>", reward_key="deleted")
    assert earned == 1.0


@pytest.mark.docker
@pytest.mark.parametrize(("file", "bounded"), [("reward.txt", -1e6), ("reward.json", 1e6)])
def test_a_reward_that_is_too_large_to_be_trained_is_a_sample(file: str, bounded: float, tmp_path: Path) -> None:
    """As of work that is wrong by far: it failed the episode, so that the worst work had no reward."""
    says = {"reward.txt": "-1e12", "reward.json": '{"reward": 5000000}'}[file]
    task = harbor_task(tmp_path, tests=f"#!/bin/sh\necho '{says}' >/logs/verifier/{file}\n")
    _, earned, info = play(task, "<answer>done</answer>")
    assert (as_reward(earned), info["success"]) == (bounded, bounded > 0)


@pytest.mark.docker
def test_the_tests_are_not_there_while_the_model_works_and_run_as_they_were_written(tmp_path: Path) -> None:
    tests = "#!/bin/sh\n[ $LIMIT = 5 ] && [ -f good ] && [ ! -e /tests/planted ] && echo 1 >/logs/verifier/reward.txt\n"
    tests += "[ -f /logs/verifier/reward.txt ] || echo 0 >/logs/verifier/reward.txt\n"
    task = harbor_task(tmp_path / "task", tests=tests, toml='[verifier]\nenv = { LIMIT = "${NOT_SET_ANYWHERE:-5}" }\n')
    plant = "<sh>ls /tests; mkdir -p /tests; : > /tests/planted; echo 1 > /logs/verifier/reward.txt; pwd</sh>"
    said, earned, _ = play(task, plant, "<answer>done</answer>")
    assert "No such file" in said[0]
    assert "/app" in said[0]
    assert earned == 0.0
    _, earned, _ = play(task, plant, "<sh>touch good</sh>", "<answer>done</answer>")
    assert earned == 1.0


@pytest.mark.docker
def test_commands_end_in_time_and_the_task_with_its_time(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "task", toml="[agent]\ntimeout_sec = 4.0\n")
    said, earned, info = play(task, "<sh>echo begun; sleep 60</sh>", "<answer>late</answer>")
    assert len(said) == 1
    assert "begun" in said[0]
    assert "timed out" in said[0]
    assert (earned, info["success"]) == (1.0, True)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("#!/bin/sh\necho no pytest here\nexit 1\n", "wrote neither .*reward.txt nor .*no pytest here"),
        ("#!/bin/sh\necho one >/logs/verifier/reward.txt\n", "reward.txt: 'one' is no finite number"),
        ("#!/no/such/bash\n", r"exit code 127: is '#!/no/such/bash', the first line of tests/test.sh, a program of"),
        ("#!/bin/sh\r\necho 1 >/logs/verifier/reward.txt\r\n", r"end as on Windows \(CRLF\), save it with LF"),
        ("#!/bin/sh\necho nan >/logs/verifier/reward.txt\n", "no finite number"),
        ('#!/bin/sh\necho \'{"a": 1, "b": 0}\' >/logs/verifier/reward.json\n', "no 'reward' but a, b"),
        ("#!/bin/sh\nsleep 60\n", "longer than 2 s"),
    ],
    ids=["nothing", "no number", "no program", "of Windows", "not finite", "several", "too slow"],
)
def test_tests_without_a_verdict_fail_the_episode_and_are_no_zero(tmp_path: Path, tests: str, reason: str) -> None:
    task = harbor_task(
        tmp_path / "strange", tests=tests, toml=f"[verifier]\ntimeout_sec = {2 if 'sleep' in tests else 60}\n"
    )
    with pytest.raises(EnvError, match=f"task .*strange: .*{reason}"):
        play(task, "<answer>done</answer>")


GIVE_ZERO = "#!/bin/sh\nsleep 0.3\necho 0 >/logs/verifier/reward.txt\n"
LEFT_RUNNING = {
    "forges": "echo 1 >/logs/r && mv /logs/r /logs/verifier/reward.txt",
    "deletes": "rm -f /logs/verifier/reward.txt",
    "kills": "kill -9 -1",
    "multiplies": "sleep 1 & sleep 1 &",
}
BROKEN = {
    "no shell": "rm -f /bin/sh /bin/bash /bin/dash",
    "no tools": "rm -rf /usr/bin/*",
    "a link for a folder": "rm -rf /logs && ln -s /proc/1 /logs",
    "a pipe for the reward": "mkdir -p /logs/verifier && mkfifo /logs/verifier/reward.txt",
    "a locked folder": "mkdir -p /tests/x && chmod 000 /tests/x /logs",
    "a deep folder": "mkdir /tests; cd /tests; for i in $(seq 300); do mkdir d && cd d; done",
    "no working directory": "rm -rf /app",
}


@pytest.mark.docker
@pytest.mark.parametrize("how", LEFT_RUNNING)
def test_what_the_model_left_running_changes_no_reward(tmp_path: Path, how: str) -> None:
    task = harbor_task(tmp_path / "task", tests=GIVE_ZERO)
    plant = f"<sh>setsid sh -c 'trap : TERM; while :; do {LEFT_RUNNING[how]}; done' >/dev/null 2>&1 &</sh>"
    _, earned, _ = play(task, plant, "<answer>done</answer>")
    assert earned == 0.0


@pytest.mark.docker
@pytest.mark.parametrize("how", BROKEN)
def test_a_sandbox_that_the_model_broke_earns_nothing_and_is_a_sample(tmp_path: Path, how: str) -> None:
    task = harbor_task(tmp_path / "task", tests=GIVE_ZERO)
    _, earned, info = play(task, f"<sh>{BROKEN[how]}</sh>", "<answer>done</answer>")
    assert (earned, info["success"]) == (0.0, False)


LOCKED = {
    "processes": "chmod 0 /proc; sleep 60",
    "root": "chmod 0 /; while :; do :; done",
    "again and again": "while :; do chmod 0 /proc; done & while :; do chmod 0 /proc; done",
}


@pytest.mark.docker
@pytest.mark.parametrize("how", LOCKED)
def test_a_command_that_locks_the_list_of_processes_ends_in_time_and_is_a_sample(tmp_path: Path, how: str) -> None:
    """Root owns /proc: without permissions the resident agent could not search it at the time-out, and died."""
    task = harbor_task(tmp_path / "task", tests=GIVE_ZERO)
    said, earned, _ = play(task, f"<sh>{LOCKED[how]}</sh>", "<answer>done</answer>", command_timeout_s=1.0)
    assert "(timed out)" in said[0]
    assert earned == 0.0


@pytest.mark.docker
def test_work_that_never_ends_earns_nothing_and_tests_that_never_end_are_no_sample(tmp_path: Path) -> None:
    tests = "#!/bin/sh\nsh /app/work\necho 1 >/logs/verifier/reward.txt\n"
    task = harbor_task(tmp_path / "task", tests=tests, toml="[verifier]\ntimeout_sec = 2\n")
    _, earned, info = play(task, "<sh>echo sleep 60 > work</sh>", "<answer>done</answer>")
    assert (earned, info["verifier_error"]) == (0.0, "its tests took longer than 2 s")
    write(task, {"tests/test.sh": "#!/bin/sh\nsleep 60\n"})
    with pytest.raises(EnvError, match="longer than 2 s"):
        play(task, "<sh>echo true > work</sh>", "<answer>done</answer>")


FILL = "for folder in /app /tmp /roll-flash /dev/shm; do head -c 100000000 /dev/zero >> $folder/fill$$; done"
"""Files in memory: no program can be ended for them, so in the end the agent is."""


@pytest.mark.docker
def test_a_model_that_fills_the_memory_until_its_sandbox_dies_earns_nothing_and_is_a_sample(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "task")
    fills = [f"<sh>{FILL}</sh>"] * 300
    said, earned, info = play(task, *fills, "<answer>done</answer>", memory_mb=32, max_turns=1000)
    assert (earned, info["success"]) == (0.0, False)
    assert "ran out of memory" in info["verifier_error"], len(said)


@pytest.mark.docker
def test_a_sandbox_that_others_killed_is_no_sample_whatever_the_model_did(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "task")

    async def run() -> None:
        env = TaskFolder(task)
        await env.reset(seed=0)
        async with open_sandbox(env.sandbox_spec, provider="docker") as env.sandbox:
            await env.step("<sh>true</sh>")
            await asyncio.to_thread(
                subprocess.run, ["docker", "kill", env.sandbox.name], check=True, capture_output=True
            )
            with pytest.raises(SandboxDied, match="killed from outside"):
                await env.step("<answer>done</answer>")

    asyncio.run(run())


@pytest.mark.docker
def test_the_commands_of_one_turn_leave_enough_of_the_step_for_the_tests(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "task", toml="[verifier]\ntimeout_sec = 2\n")

    async def run() -> tuple[str, float]:
        env = TaskFolder(task)
        env.step_timeout_s = 2 * (2 + MARGIN_S) + 3
        await env.reset(seed=0)
        async with open_sandbox(env.sandbox_spec, provider="docker") as env.sandbox:
            began = time.monotonic()
            observation, *_ = await env.step("<sh>echo begun; sleep 60</sh>\n" * 5)
            assert time.monotonic() - began < 10
            _, earned, *_ = await env.step("<answer>done</answer>")
            return str(observation), earned

    said, earned = asyncio.run(run())
    assert "begun" in said
    assert "taken all of its time" in said
    assert earned == 1.0


@pytest.mark.docker
def test_a_task_without_a_verdict_is_no_sample_whatever_the_model_did(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "task", tests="#!/bin/sh\nexit 1\n")
    with pytest.raises(EnvError, match="wrote neither"):
        play(task, "<sh>true</sh>", "<answer>done</answer>")


@pytest.mark.docker
def test_with_artifacts_nothing_but_the_work_itself_is_judged(tmp_path: Path) -> None:
    """Root may replace any program of its sandbox; those of a fresh one it cannot reach."""
    tests = "#!/bin/sh\ncmp -s /app/work/out /tests/wanted && R=1 || R=0\necho $R >/logs/verifier/reward.txt\n"
    task = harbor_task(tmp_path / "task", tests=tests)
    write(task, {"tests/wanted": "right\n"})
    cheat = "<sh>printf '#!/bin/sh\\n' >/usr/bin/cmp; chmod +x /usr/bin/cmp; mkdir -p work; echo wrong >work/out</sh>"
    assert play(task, cheat, "<answer>done</answer>")[1] == 1.0  # what docs/adapters.md says of it
    given = {"artifacts": ["/app/work", "/app/none"]}
    assert play(task, cheat, "<answer>done</answer>", **given)[1] == 0.0
    assert play(task, "<sh>mkdir work; echo right >work/out</sh>", "<answer>done</answer>", **given)[1] == 1.0


@pytest.mark.docker
@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        ("true", "abs bad file link sub"),
        ("rm bad link; echo right >out", "abs file out sub"),
        ("ln -sf sub link; rm abs; ln -s /tests/wanted abs; ln -s /tests/wanted more", "abs bad file link sub"),
        ("rm -r *; mkdir abs file; echo >sub", "abs file sub"),
        ("cd /; rm -r app", ""),
        ("cd /; rm -r app; echo >app", "app"),
    ],
    ids=["nothing", "removed", "links", "other kinds", "all", "a file"],
)
def test_an_artifact_takes_the_place_of_what_the_image_has_there(work: str, wanted: str, tmp_path: Path) -> None:
    image = f"{ON_OUR_IMAGE}RUN mkdir sub && touch bad file && ln -s file link && ln -s /etc/hostname abs\n"
    tests = (
        "#!/bin/sh\ncmp -s app/abs /tests/wanted && exit 1\n"
        'if [ "$(ls app | tr "\\n" " ")" = "$(cat /tests/wanted)" ]; then R=1; else R=0; fi\n'
        "echo $R >/logs/verifier/reward.txt\n"
    )
    task = harbor_task(tmp_path / "task", tests=tests, dockerfile=image, toml='[environment]\nworkdir = "/"\n')
    write(task, {"tests/wanted": f"{wanted} " if wanted else ""})
    _, earned, info = play(task, f"<sh>cd /app; {work}</sh>", "<answer>done</answer>", artifacts=["/app"])
    assert earned == 1.0, info


@pytest.mark.docker
@pytest.mark.parametrize("work", ["true", "rm -r many"])
def test_an_artifact_that_is_too_large_in_the_image_is_no_sample(work: str, tmp_path: Path) -> None:
    """Every right solution earned 0: its folder could not be copied, as if the model had done that."""
    many = "RUN mkdir many && cd many && seq 20001 | xargs touch\n"
    task = harbor_task(tmp_path / "task", dockerfile=f"{ON_OUR_IMAGE}{many}")
    with pytest.raises(EnvError, match="artifacts: /app of the image cannot be copied, name less of it"):
        play(task, f"<sh>{work}; echo right >out</sh>", "<answer>done</answer>", artifacts=["/app"])
    with pytest.raises(ConfigError, match="'/app//many/' is in '/app'"):
        TaskFolder(task, artifacts=["/app", "/app//many/"])


def test_only_so_many_artifacts_are_on_the_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy may take 512 MiB of the machine's disk: a hundred episodes that end together took 50 GiB."""
    copies, tests, most = [0], [0], [0, 0]

    class AnySandbox:
        """A stand-in: what is copied and run is too."""

        @asynccontextmanager
        async def fresh(self) -> AsyncIterator[AnySandbox]:
            yield self

    async def nothing(*_: Any) -> None:
        """Leave the sandbox as it is."""

    async def busy(count: list[int], number: int) -> None:
        count[0] += 1
        most[number] = max(most[number], count[0])
        await asyncio.sleep(0.01)
        count[0] -= 1

    async def test_run(*_: Any) -> Verdict:
        await busy(tests, 1)
        return Verdict(1.0, "")

    monkeypatch.setattr(env_module, "make_folders", nothing)
    monkeypatch.setattr(env_module, "copy_out", lambda *_: busy(copies, 0))
    monkeypatch.setattr(env_module, "run_tests", test_run)

    async def run() -> None:
        envs = [TaskFolder(harbor_task(tmp_path / "task"), artifacts=["/app"]) for _ in range(20)]
        for env in envs:
            env._task, env.sandbox = load_task(tmp_path / "task"), cast("Any", AnySandbox())
        assert [verdict.reward for verdict in await asyncio.gather(*(env._verdict() for env in envs))] == [1.0] * 20

    asyncio.run(run())
    assert most[0] == COPIES_AT_ONCE
    assert most[1] >= 1


@pytest.mark.parametrize("arguments", [{"artifacts": "/app/out"}, {"allow": "example.org:443"}])
def test_one_entry_that_is_no_list_is_said_to_be_none(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Each of its letters was an entry: "artifacts: '/' is not the absolute path of a file or folder"."""
    ((name, given),) = arguments.items()
    with pytest.raises(ConfigError, match=rf'TaskFolder-v0: {name} is a list; write {name}: \["{given}"\]'):
        TaskFolder(harbor_task(tmp_path / "task"), **arguments)


def test_no_other_episode_waits_while_the_copy_of_an_artifact_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 folders held up the event loop of a worker for a second of processor time."""
    remove, threads = shutil.rmtree, set[bool]()

    def noted(*args: Any, **kwargs: Any) -> None:
        threads.add(threading.current_thread() is threading.main_thread())
        remove(*args, **kwargs)

    async def copy() -> bytes:
        spec = SandboxSpec(files=(("w/a", b"1"),))
        async with (
            open_sandbox(spec, provider="local") as sandbox,
            open_sandbox(SandboxSpec(), provider="local") as target,
        ):
            monkeypatch.setattr(shutil, "rmtree", noted)
            await copy_out(sandbox, ["/sandbox/w"], target)
            return await target.read("w/a")

    assert asyncio.run(copy()) == b"1"
    assert threads == {False}


@pytest.mark.parametrize("what", ["mkdir", "scandir"], ids=["a full disk", "too many open files"])
def test_work_that_this_machine_cannot_copy_is_no_verdict(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a verdict the model has broken its sandbox, which earns 0."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        if what == "mkdir" and "dir_fd" not in kwargs:
            return works(*args, **kwargs)
        monkeypatch.setattr(os, what, works)
        raise OSError({"mkdir": errno.ENOSPC, "scandir": errno.EMFILE}[what], "not now", "x")

    async def copy() -> None:
        spec = SandboxSpec(files=(("w/inner/a", b"1"),))
        async with (
            open_sandbox(spec, provider="local") as sandbox,
            open_sandbox(SandboxSpec(), provider="local") as target,
        ):
            monkeypatch.setattr(os, what, fails)
            await copy_out(sandbox, ["/sandbox/w"], target)

    works = getattr(os, what)
    with pytest.raises(SandboxHostError, match="not now"):
        asyncio.run(copy())


@pytest.mark.parametrize("written", ["1_0", "inf", "nan", "", "0x1", "١", "1 1", "1e9999", "9" * 5000])
def test_a_reward_that_is_no_plain_number_is_none(written: str) -> None:
    assert (reward_of_text(" .5\n"), reward_of_text("-1e-2")) == (0.5, -0.01)
    with pytest.raises(ValueError, match=r"no finite number"):
        reward_of_text(written)


@pytest.mark.parametrize(
    "written", ['{"reward": "1"}', "[1]", "1", '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", "{", "{}"]
)
def test_a_reward_in_json_that_is_no_plain_number_is_none(written: str) -> None:
    assert (reward_of_json('{"a": 1, "b": 0}', "b"), reward_of_json('{"a": true}', "b")) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"\S"):
        reward_of_json(written, "reward")


@pytest.mark.docker
def test_an_image_that_cannot_be_built_names_its_task(tmp_path: Path) -> None:
    task = harbor_task(tmp_path / "unbuilt", dockerfile=f"{ON_OUR_IMAGE}COPY missing /\n")
    with pytest.raises(SandboxError, match=r"unbuilt: .*missing"):
        play(task, "<answer>done</answer>")


TERMINAL_BENCH = {
    "task.yaml": "instruction: |-\n  Write hello into /app/hello.txt.\nparser_name: pytest\nmax_test_timeout_sec: 60\n",
    "docker-compose.yaml": "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n",
    "Dockerfile": ON_OUR_IMAGE,
    "solution.sh": "echo hello > /app/hello.txt\n",
    "tests/wanted": "hello\n",
    # what `pytest -rA` ends with
    "run-tests.sh": 'echo "== short test summary info =="\necho "PASSED tests/test_outputs.py::test_exists"\n'
    'if cmp -s $TEST_DIR/wanted hello.txt; then echo "PASSED tests/test_outputs.py::test_content"\n'
    'else echo "FAILED tests/test_outputs.py::test_content"; fi\n',
}


@pytest.mark.docker
def test_a_task_of_terminal_bench_is_solved_when_all_its_tests_pass(tmp_path: Path) -> None:
    task = write(tmp_path / "hello", TERMINAL_BENCH)
    assert play(task)[1] == 1.0
    assert play(task, "<sh>echo bye > hello.txt</sh>", "<answer>done</answer>")[1] == 0.0
    write(task, {"run-tests.sh": "echo uv: command not found\n"})
    with pytest.raises(EnvError, match=r"no pytest summary .*command not found"):
        play(task, "<answer>done</answer>")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"task.toml": "version = ", "instruction.md": "x"}, "task.toml: not valid TOML"),
        ({"task.toml": ""}, "instruction.md is missing"),
        ({"instruction.md": "x"}, "no task.toml in it"),
        ({"task.toml": "", "instruction.md": "x"}, "tests/test.sh is missing"),
        ({"task.toml": "", "instruction.md": "x", "tests/test.sh": ""}, "neither environment/Dockerfile nor"),
        ({"task.toml": '[agent]\ntimeout_sec = "soon"', "instruction.md": "x"}, "agent.timeout_sec: .*number"),
        ({"task.toml": "[verifier]\ntimeout_sec = inf", "instruction.md": "x"}, "verifier.timeout_sec: .*604800"),
        (
            {"task.yaml": "instruction: x\nmax_test_timeout_sec: 1e9", "run-tests.sh": ""},
            "max_test_timeout_sec: .*604800",
        ),
        ({"task.toml": '[[steps]]\nname = "one"', "instruction.md": "x"}, "steps: .*at most 0"),
        ({"task.yaml": "instruction: [", "run-tests.sh": ""}, "not valid YAML"),
        ({"task.yaml": "parser_name: pytest", "run-tests.sh": ""}, "instruction: Field required"),
        ({"task.yaml": "created: 2024-13-45", "run-tests.sh": ""}, "cannot be read: month must be in 1..12"),
        ({"task.yaml": "[" * 2000 + "]" * 2000, "run-tests.sh": ""}, "cannot be read: .*deep"),
        ({"task.yaml": f"instruction: {'1:' * 9000}1", "run-tests.sh": ""}, "cannot be read: .*number"),
        ({**TERMINAL_BENCH, "docker-compose.yaml": "[1]"}, "cannot be read: 'list' object"),
        (
            {**TERMINAL_BENCH, "docker-compose.yaml": "services: {client: {}, database: {}}"},
            "services are client, database; only one",
        ),
    ],
)
def test_a_folder_that_is_no_whole_task_is_one_line_that_says_why(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    task = write(tmp_path / "half", files)
    with pytest.raises(ConfigError, match=f"half.*{reason}") as error:
        TaskFolder(task)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["instruction.md", "tests", "environment", "task.toml"])
def test_a_task_takes_no_files_of_this_machine_through_links(tmp_path: Path, name: str) -> None:
    """A model, and whoever serves it, would see them: the instruction may be a link to a key."""
    task, elsewhere = harbor_task(tmp_path / "task"), harbor_task(tmp_path / "elsewhere")
    (task / name).rename(task / "away")
    (task / name).symlink_to(elsewhere / name)
    with pytest.raises(ConfigError, match=f"task/{name}: it leads out of the task's folder"):
        load_task(task)
    (task / name).unlink()
    (task / name).symlink_to("away")
    assert load_task(task).instruction == "Do it."


@pytest.mark.parametrize("name", ["tests/test.sh", "solution/solve.sh"])
def test_a_script_of_a_task_is_no_link_to_a_file_of_this_machine(tmp_path: Path, name: str) -> None:
    """Its first line was shown if it could not be run in the sandbox: that of a key, or of /proc/kmsg for ever."""
    task = harbor_task(tmp_path / "task")
    (tmp_path / "key").write_text("secret")
    (task / name).parent.mkdir(exist_ok=True)
    (task / name).unlink(missing_ok=True)
    (task / name).symlink_to(tmp_path / "key")
    with pytest.raises(ConfigError, match=f"task/{name}: it leads out of the task's folder"):
        load_task(task)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "environment/Dockerfile"])
def test_a_text_of_a_task_that_is_far_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    task = harbor_task(tmp_path / "task")
    with (task / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=f"task: cannot be read: .*{Path(name).name}.*larger than 1 MiB"):
        load_task(task)


@pytest.mark.parametrize(
    "build", ["context: ..", "context: ../elsewhere", "context: /", "dockerfile: ../elsewhere/Dockerfile"]
)
def test_a_task_of_terminal_bench_is_built_from_its_own_folder(tmp_path: Path, build: str) -> None:
    write(tmp_path / "elsewhere", {"Dockerfile": ON_OUR_IMAGE, "secret": "x"})
    compose = f"services: {{client: {{build: {{{build}}}}}}}"
    with pytest.raises(ConfigError, match="it leads out of the task's folder"):
        load_task(write(tmp_path / "task", {**TERMINAL_BENCH, "docker-compose.yaml": compose}))


def test_a_build_has_no_file_that_the_tasks_dockerignore_names(tmp_path: Path) -> None:
    """A Dockerfile of `COPY . /app` would bring the model the solution that it leaves out elsewhere."""
    files = {**TERMINAL_BENCH, "solution.sh": "secret", "data": "x", ".dockerignore": "solution.sh\ntests\n*.yaml"}
    task = load_task(write(tmp_path / "task", {**files, "tests/test_it.py": "secret"}))
    with tarfile.open(fileobj=io.BytesIO(task.spec.context)) as packed:
        assert sorted(packed.getnames()) == [".dockerignore", "data", "run-tests.sh"]


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a\nWORKDIR /x\nworkdir y\n", "/x/y"),
        ("FROM a\nWORKDIR '/x'\nWORKDIR $HOME\n# WORKDIR /z\n", "/x"),
        ("FROM a AS build\nWORKDIR /build\nFROM b\nCOPY --from=build /build/x /\n", "/app"),
        ("FROM a AS build\nWORKDIR /build\nFROM --platform=linux/amd64 b\nWORKDIR app\n", "/app"),
        ("FROM a as Base\nWORKDIR /base\nFROM b\nWORKDIR /other\nFROM base as last\nWORKDIR x\n", "/base/x"),
    ],
)
def test_commands_start_where_the_last_stage_of_the_build_does(dockerfile: str, workdir: str, tmp_path: Path) -> None:
    """They started in the folder in which something else was built."""
    assert load_task(harbor_task(tmp_path / "task", dockerfile=dockerfile)).workdir == workdir


@pytest.mark.parametrize(
    "files",
    [
        {"environment/Dockerfile": ON_OUR_IMAGE + "\n" * 1_000_000},
        {"environment/Dockerfile": ON_OUR_IMAGE + "FROM " + "--a " * 200_000},
        {"task.toml": "[environment]\nenv = {A = '" + "${A:-" * 200_000 + "'}"},
    ],
)
def test_no_text_of_a_task_takes_for_ever_to_read(tmp_path: Path, files: dict[str, str]) -> None:
    """It would hold up all episodes of a worker."""
    task = write(harbor_task(tmp_path / "task"), files)
    began = time.thread_time()
    assert load_task(task).workdir == "/app"
    assert time.thread_time() - began < 2


def test_variables_of_this_machine_that_tasks_get_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_KEY_OF_OURS", "secret")
    toml = '[environment]\nenv = { A = "${A_KEY_OF_OURS}", B = "${NOT_SET_HERE:-b}" }\n'
    assert {("A", "secret"), ("B", "b")} <= set(load_task(harbor_task(tmp_path / "task", toml=toml)).spec.env)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.endswith("tasks get the variable A_KEY_OF_OURS of this machine: their task.toml asks for it")


def test_one_broken_task_spoils_only_its_own_episodes(tmp_path: Path) -> None:
    harbor_task(tmp_path / "a-good")
    (harbor_task(tmp_path / "b-broken") / "tests/test.sh").unlink()
    env = TaskFolder(tmp_path)
    asyncio.run(env.reset(seed=0))
    assert env.task.name == "a-good"
    with pytest.raises(ConfigError, match=r"b-broken: tests/test.sh is missing"):
        asyncio.run(env.reset(seed=1))


def names(tasks: Sequence[Path]) -> list[str]:
    return [task.name for task in tasks]


def test_tasks_are_found_below_a_folder_in_order(tmp_path: Path) -> None:
    for name in ("set/b", "set/a", "c"):
        harbor_task(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert names(find_tasks(tmp_path)) == ["c", "a", "b"]
    assert names(find_tasks(tmp_path / "c")) == ["c"]
    for folder, reason in ((tmp_path / "notes", "no task in it"), (tmp_path / "gone", "no such folder")):
        with pytest.raises(ConfigError, match=reason):
            find_tasks(folder)


def test_folders_beside_tasks_that_are_none_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("set/b", "c"):
        harbor_task(tmp_path / name)
    for name in ("set/forgotten", "notes", ".git"):
        (tmp_path / name).mkdir()
    find_tasks(tmp_path)
    find_tasks(tmp_path)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.endswith("not played, because there is no task.toml or task.yaml: notes, set/forgotten")


def test_what_a_task_asks_for_is_what_its_sandbox_gets_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    toml = '[environment]\ncpus = 2\nmemory = "1G"\ndocker_image = "theirs:1"\nworkdir = "/work"\nenv = { A = "b" }\n'
    task = harbor_task(tmp_path / "task", toml=toml)
    loaded = load_task(task)
    assert (loaded.spec.image, loaded.spec.cpus, loaded.spec.memory_mb, loaded.workdir) == (
        "theirs:1",
        2,
        1024,
        "/work",
    )
    assert ("A", "b") in loaded.spec.env
    assert loaded.spec.network == "none"
    env = TaskFolder(task, memory_mb=300, force_build=True, workdir="/there", allow=["example.org:443"])
    spec = env.sandbox_spec
    assert spec is not None
    assert (spec.image, spec.dockerfile, spec.memory_mb) == (None, ON_OUR_IMAGE, 300)
    assert (env.task.workdir, spec.allow) == ("/there", ("example.org:443",))
