"""Agent programs in real sandboxes: what they reach, how they end, and what their work is worth.

The model is a script here; tests/envs/test_agent_env_runs.py has the real gateway and a model that learns.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from scripted_chat import Access, Answer, Script, calls, says, scripted_chat

from roll_flash.config.tree import RolloutConfig
from roll_flash.envs import make_env
from roll_flash.envs.agents.agent_env import AgentEnv
from roll_flash.envs.agents.presets import AGENTS_IMAGE
from roll_flash.envs.agents.verifier import CommandVerifier, _said_reward
from roll_flash.envs.held_out import draw_problem
from roll_flash.envs.shipped.repair_bugs import draw_bug, make_repair
from roll_flash.errors import ConfigError, EnvError
from roll_flash.sandboxes import ExecResult, Sandbox, SandboxDied, SandboxSpec, open_sandbox

pytestmark = pytest.mark.docker
SEED = 3
ASK = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "?"}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


def quiet(number: int, body: dict[str, Any]) -> Answer:
    return says("ok")


def python(code: str, **more: Any) -> AgentEnv:
    given = {"instruction": "do it", "verifier": "true", **more}
    return AgentEnv(command=["python3", "-c", code], image=AGENTS_IMAGE, memory_mb=256, **given)


async def play(env: AgentEnv, script: Script = quiet, seed: int = SEED) -> tuple[float, dict[str, Any], Access]:
    async with scripted_chat(script) as access, open_sandbox(env.sandbox_spec, provider="docker") as sandbox:
        env.sandbox = sandbox
        await env.reset(seed=seed)
        await env.play(access)
        reward, info = await env.score()
        return reward, info, access


def run(env: AgentEnv, script: Script = quiet) -> tuple[float, dict[str, Any]]:
    reward, info, _ = asyncio.run(play(env, script))
    return reward, info


def fixed_program() -> str:
    return make_repair(draw_problem(SEED, draw_bug, str), random.Random(SEED)).right


FIX = f"cat > program.py <<'END'\n{fixed_program()}END\n"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SCRIPTS: dict[str, tuple[str, list[Answer]]] = {
    "openai": ("OpenAIAgent-v0", [calls("sh", command=FIX), says("done")]),
    "mini-swe-agent": ("MiniSweAgent-v0", [calls("bash", command=FIX), calls("bash", command=SUBMIT)]),
    "smolagents": (
        "SmolAgent-v0",
        [says(f"<code>\nprint(sh({FIX!r}))\n</code>"), says("<code>\nfinal_answer('done')\n</code>")],
    ),
}


@pytest.mark.parametrize("agent", SCRIPTS)
def test_an_agent_that_others_wrote_repairs_a_program_and_passes_its_hidden_tests(agent: str) -> None:
    env_id, answers = SCRIPTS[agent]
    env: Any = make_env(env_id, task_env="PythonRepair-v0").unwrapped
    reward, info, access = asyncio.run(play(env, lambda number, body: answers[number]))
    assert (reward, info["success"], info["agent_ended"], len(access.asked)) == (1.0, True, "finished", 2)
    assert set(access.keys) == {f"Bearer {access.api_key}"}
    assert "Hidden tests will call" in str(access.asked[0]["messages"])


def test_the_agents_in_the_image_are_what_their_authors_published() -> None:
    code = """
import base64, hashlib
from importlib.metadata import distribution
for name in ("openai", "mini-swe-agent", "smolagents"):
    checked = 0
    for file in distribution(name).files:
        if file.hash is not None and not str(file).startswith(".."):
            found = base64.urlsafe_b64encode(hashlib.sha256(file.read_binary()).digest()).rstrip(b"=").decode()
            assert found == file.hash.value, file
            checked += 1
    print(name, distribution(name).version, checked > 20)
"""

    async def look() -> str:
        async with open_sandbox(SandboxSpec(image=AGENTS_IMAGE), provider="docker") as sandbox:
            result = await sandbox.exec(["python3", "-c", code])
            return result.stdout_text + result.stderr_text

    lines = asyncio.run(look()).splitlines()
    assert [line.split()[0::2] for line in lines] == [
        [name, "True"] for name in ("openai", "mini-swe-agent", "smolagents")
    ]
    assert "mini-swe-agent 2.4.6 True" in lines


def test_a_crash_is_counted_and_the_work_so_far_is_scored() -> None:
    reward, info = run(python(ASK + "open('made', 'w'); raise SystemExit(7)", verifier="test -f made"))
    assert (reward, info["success"], info["agent_ended"], info["agent_exit"]) == (1.0, True, "crashed", 7)


def test_an_agent_that_hangs_is_ended_and_its_work_so_far_scored() -> None:
    code = ASK + "import time; open('made', 'w').close(); time.sleep(600)"
    reward, info = run(python(code, verifier="test -f made", time_limit_s=8))
    assert (reward, info["agent_ended"]) == (1.0, "time_limit")


def test_a_hundred_megabytes_of_output_are_counted_and_cut() -> None:
    code = ASK + "for _ in range(100): print('x' * 1_000_000)"
    reward, info = run(python(code))
    assert (reward, info["agent_ended"], info["agent_output_truncated"]) == (1.0, "finished", True)
    assert info["agent_output_bytes"] == 100_000_100
    assert len(str(info)) < 4000


def test_an_agent_that_never_calls_the_model_is_a_failure_that_says_why() -> None:
    with pytest.raises(
        EnvError, match=r"no call of the model: it ended with exit status 1 .*ImportError: no such thing"
    ):
        run(python("raise ImportError('no such thing')"))


def test_a_program_that_is_not_there_is_named() -> None:
    env = AgentEnv(command=["no-such-agent"], instruction="x", verifier="true")
    with pytest.raises(EnvError, match=r"cannot be started .*no-such-agent"):
        run(env)


@pytest.mark.parametrize("reason", ["oom", "killed"])
@pytest.mark.parametrize("dies_at", ["fill", "kill_all", "check", "partly"])
def test_an_agent_that_fills_its_sandbox_until_it_dies_earns_nothing_and_is_a_sample(reason: str, dies_at: str) -> None:
    """Also where it leaves so little memory that what comes after it is too much."""

    class Dies:
        accepted = 1

        async def write(self, path: str, data: bytes | str) -> None: ...

        async def remove(self, path: str) -> None: ...

        async def kill_all(self) -> None:
            if dies_at == "kill_all":
                raise SandboxDied("it is gone", reason)

        @asynccontextmanager
        async def forward(self, port: int, host_port: int) -> AsyncIterator[Any]:
            yield self

        async def exec(self, command: str, **_: Any) -> ExecResult:
            if command.endswith(dies_at):
                raise SandboxDied("it is gone", reason)
            return ExecResult(0, b"", b"")

    async def play() -> tuple[float, dict[str, Any]]:
        env = AgentEnv(command="fill", instruction="Do it.", verifier="check", partial_credit="partly")
        env.sandbox = cast(Any, Dies())
        await env.reset(seed=0)
        access = SimpleNamespace(port=1, api_key="key", model="model", answers=list)
        await env.play(cast(Any, access))
        return await env.score()

    if reason == "oom":
        reward, info = asyncio.run(play())
        assert (reward, info["agent_ended"], info["success"]) == (0.0, "out_of_memory", False)
    else:
        with pytest.raises(SandboxDied):
            asyncio.run(play())


def test_what_the_agent_left_running_cannot_meddle_with_the_check() -> None:
    endless = "['sh', '-c', 'while :; do echo 1 > answer; done']"
    code = f"{ASK}import subprocess; subprocess.Popen({endless}, start_new_session=True)"
    reward, _ = run(python(code, verifier="rm -f answer; sleep 0.3; test ! -f answer"))
    assert reward == 1.0


def test_the_model_is_all_that_is_reached() -> None:
    code = """
import os, socket
from urllib.parse import urlsplit
reached = []
for host, port in ((urlsplit(os.environ["OPENAI_BASE_URL"]).hostname, 8011), ("127.0.0.1", REAL), ("172.17.0.1", REAL)):
    try:
        socket.create_connection((host, port), 2).close()
        reached.append(port)
    except OSError:
        pass
open("reached", "w").write(str(reached))
"""

    async def look() -> bytes:
        async with scripted_chat(quiet) as access:
            env = python(ASK + code.replace("REAL", str(access.port)))
            async with open_sandbox(env.sandbox_spec, provider="docker") as sandbox:
                env.sandbox = sandbox
                await env.reset(seed=SEED)
                await env.play(access)
                return await sandbox.read("reached")

    assert asyncio.run(look()) == b"[8011]"


def test_the_program_has_the_keys_of_the_fixed_policies_that_it_may_ask() -> None:
    code = f"{ASK}\nimport os\nopen('keys', 'w').write(str([(k, v) for k, v in os.environ.items() if 'POLICY' in k]))"

    async def look() -> bytes:
        async with scripted_chat(quiet) as access:
            env = python(code, policies=["user"])
            assert env.policies == ("user",)
            async with open_sandbox(env.sandbox_spec, provider="docker") as sandbox:
                env.sandbox = sandbox
                await env.reset(seed=SEED)
                await env.play(replace(access, policy_keys={"user": "the-key-of-the-user"}))
                return await sandbox.read("keys")

    assert asyncio.run(look()) == b"[('POLICY_KEY_USER', 'the-key-of-the-user')]"


@pytest.mark.parametrize("how", ["argument", "variable", "file", "standard input", "shell line"])
def test_the_instruction_comes_in_every_way_as_it_is(how: str) -> None:
    instruction = """it's "{seed}"; $HOME `id` \\n"""
    source = {
        "argument": "import sys; said = sys.argv[1]",
        "variable": "said = os.environ['AGENT_INSTRUCTION']",
        "file": "said = open(os.environ['AGENT_INSTRUCTION_FILE']).read()",
        "standard input": "import sys; said = sys.stdin.read()",
        "shell line": "import sys; said = sys.argv[1]",
    }[how]
    code = f"{ASK}\n{source}\nopen('said', 'w').write(said)"
    command: Any = ["python3", "-c", code, *(["{instruction}"] if how == "argument" else [])]
    more: dict[str, Any] = {"command": command}
    if how == "shell line":
        more = {"command": "python3 agent.py {instruction}", "files": {"agent.py": code}}
    env = AgentEnv(
        **more, image=AGENTS_IMAGE, instruction=instruction, verifier_function="test_agent_env:said_the_seed"
    )
    assert run(env)[0] == 1.0


def test_an_instruction_that_no_variable_holds_comes_by_file_and_standard_input() -> None:
    """Kernels start no program with a variable of 128 KiB: no episode of such a task gave a sample."""
    found = "len(sys.stdin.read()) == len(open(os.environ['AGENT_INSTRUCTION_FILE']).read()) == 200_000"
    code = f"{ASK}\nimport sys; open('said', 'w').write(str({found}))"
    env = AgentEnv(
        command=["python3", "-c", code], image=AGENTS_IMAGE, instruction="x" * 200_000, verifier="grep -q True said"
    )
    assert run(env)[0] == 1.0


async def said_the_seed(sandbox: Sandbox, seed: int) -> float:
    return float(await sandbox.read("said") == f"""it's "{seed}"; $HOME `id` \\n""".encode())


def test_a_verifier_may_say_a_number_and_bring_files_that_the_agent_never_saw() -> None:
    code = ASK + "import os; open('seen', 'w').write(str(os.path.exists('wanted')))"
    env = python(code, verifier="grep -q False seen && cat wanted", verifier_files={"wanted": "0.25"})
    reward, info = run(env)
    assert (reward, info["success"]) == (0.25, False)


def test_a_folder_where_the_check_writes_its_files_does_not_stop_the_check() -> None:
    code = ASK + "import os; [os.makedirs(name + '/x', exist_ok=True) for name in ('wanted', '/tmp/agent/output')]"
    env = python(code, verifier="cat wanted", verifier_files={"wanted": "0.5"}, partial_credit="echo 1")
    assert run(env)[0] == pytest.approx(0.9 * 0.5 + 0.1)


PLANT = """
import os, site, sys
lie = "import os\\nprint(1.0, flush=True)\\nos._exit(0)\\n"
for folder in (".local/lib/python3.%d/site-packages" % sys.version_info[1], "bin", "."):
    os.makedirs(folder, exist_ok=True)
    for name in ("usercustomize.py", "sitecustomize.py", "json.py", "string.py"):
        open(folder + "/" + name, "w").write(lie)
for name in ("python3", "grep", "bin/python3"):
    open(name, "w").write("#!/bin/sh\\necho 1.0\\n")
    os.chmod(name, 0o755)
for name in (".profile", ".shrc", ".bashrc"):
    open(name, "w").write("echo 1.0; exit 0\\n")
"""


@pytest.mark.parametrize(
    "verifier",
    [
        "python3 -c 'import json, string; print(0.0)'",
        "python3 check.py",
        "cd /tmp && python3 -c 'print(0.0)'",
        "python3 -m json.tool check.json >/dev/null && echo 0.0",
        "ls ~/.local; [ ! -e ~ ] && env | grep -q '^PATH=.*/usr/bin' && grep -q . check.py && echo 0.0",
        "env -u PYTHONSAFEPATH python3 -I check.py",
    ],
)
def test_what_an_agent_planted_says_nothing_in_the_check(verifier: str) -> None:
    files = {"check.py": "import json\nimport string\nprint(0.0)\n", "check.json": "{}"}
    env = python(ASK + PLANT, verifier=verifier, verifier_files=files)
    reward, info = run(env)
    assert (reward, info["verifier_exit"]) == (0.0, 0)


@pytest.mark.parametrize("folder", ["/tmp/bin", "/data", "/data/bin"])
def test_a_path_of_the_image_that_an_agent_can_write_is_not_searched_by_the_check(folder: str) -> None:
    """Also if it has taken away its own permission to write there, as the owner of a volume can."""
    volume = "USER root\nRUN mkdir /data\nVOLUME /data\n"
    path = f"ENV PATH={folder}:/sandbox/bin:.:/usr/local/bin:/usr/bin:/bin\n"
    code = f"{ASK}import os; os.makedirs('{folder}', exist_ok=True); "
    code += f"open('{folder}/cmp', 'w').write('#!/bin/sh\\n'); "
    code += f"os.chmod('{folder}/cmp', 0o755); os.chmod('{folder}', 0o555)"
    env = AgentEnv(
        command=["python3", "-c", code],
        dockerfile=f"FROM {AGENTS_IMAGE}\n{volume}{path}",
        instruction="x",
        memory_mb=256,
        verifier="cmp -s /dev/null /etc/passwd",
    )
    assert run(env)[0] == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "open('/tmp/full', 'wb').write(b'x' * 10**9)",
        "open('full', 'wb').write(b'x' * 10**9)",
        "import os; open('given', 'w'); os.chmod('.', 0)",
        "import os; os.symlink('/usr', 'given')",
        "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(300)]; os.rename('/sandbox/d', '/sandbox/given')",
    ],
    ids=["/tmp is full", "the disk is full", "no access", "a link", "too deep to remove"],
)
def test_an_agent_that_stands_in_the_way_of_its_check_earns_nothing_and_is_a_sample(code: str) -> None:
    env = python(ASK + code, verifier="false", verifier_files={"given/wanted": "1", "/tmp/wanted": "x" * 9999})
    assert run(env)[0] == 0.0


PLANT = """
import importlib._bootstrap_external as imports, os
os.mkdir('__pycache__')
code = compile('VALUE = 1', 'wanted.py', 'exec')
open(imports.cache_from_source('wanted.py'), 'wb').write(imports._code_to_hash_pyc(code, bytes(8), False))
"""
"""Python does not compare such a file with the source that it stands for."""


def test_a_check_imports_its_own_files_and_not_what_an_agent_compiled_for_them() -> None:
    check = "python3 -c 'import sys; sys.path.insert(0, \"\"); import wanted; print(wanted.VALUE)'"

    async def play() -> tuple[float, dict[str, Any]]:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            assert (await sandbox.exec(["python3", "-c", PLANT])).ok
            return await CommandVerifier(check, {"wanted.py": "VALUE = 0"}, 10.0)(sandbox, {})

    assert asyncio.run(play())[0] == 0.0


LINKS = {
    "its own environment": ('grep -q "$SEED" answer.txt', {}, "ln -s /proc/self/environ answer.txt"),
    "a folder of /proc": ("grep -q secret out/environ", {}, "ln -s /proc/self out"),
    "what it compares with": ("cmp -s answer.txt wanted", {"wanted": "secret"}, "ln -s wanted answer.txt"),
    "by way of another": (
        "cmp -s answer.txt /tmp/a/wanted",
        {"/tmp/a/wanted": "secret"},
        "mkdir d; ln -s /tmp/a/wanted d/l; ln -s d/l answer.txt",
    ),
    "a folder": ("cmp -s out/result wanted/result", {"wanted/result": "secret"}, "mkdir wanted; ln -s wanted out"),
    "the folder above": ("cmp -s out/result result", {"result": "secret"}, "ln -s . out"),
    "a name with blanks": ("cmp -s 'a b' 'c d'", {"c d": "secret"}, "ln -s 'c d' 'a b'"),
    "the check's input": ("printf secret | cmp -s - answer.txt", {}, "ln -s /dev/stdin answer.txt"),
    "a folder with its input": ("printf secret | cmp -s - out/stdin", {}, "ln -s /dev out"),
    "the check's folder": (
        "cd t && cmp -s wanted ../answer.txt",
        {"t/wanted": "secret"},
        "touch wanted; ln -s /proc/self/cwd/wanted answer.txt",
    ),
    "a file that was there": ("cmp -s answer.txt e", {"e": "secret"}, "touch e; ln -s e answer.txt"),
}


@pytest.mark.parametrize("provider", ["local", pytest.param("docker", marks=pytest.mark.docker)])
@pytest.mark.parametrize("name", LINKS)
def test_no_link_of_an_agent_shows_a_check_what_it_compares_with(name: str, provider: str) -> None:
    check, files, plant = LINKS[name]

    async def play() -> tuple[float, float]:
        async with open_sandbox(SandboxSpec(), provider=provider) as sandbox:
            assert (await sandbox.exec(plant)).ok
            forged, _ = await CommandVerifier(check, files, 10.0)(sandbox, {"SEED": "secret"})
            await sandbox.exec("rm -rf answer.txt out 'a b' d; mkdir d; echo -n secret > d/x; ln -s d/x answer.txt")
            honest, _ = await CommandVerifier("grep -q secret answer.txt", {}, 10.0)(sandbox, {})
            return forged, honest

    assert asyncio.run(play()) == (0.0, 1.0), "links between the agent's own files stay"


@pytest.mark.docker
@pytest.mark.parametrize(("folder", "mode"), [("/data", "755"), ("/tmp/inner", "755"), ("/data", "111")])
def test_no_link_in_a_volume_of_the_image_shows_a_check_what_it_compares_with(folder: str, mode: str) -> None:
    volumes = "USER root\nRUN mkdir -p /data /tmp/inner && chmod 777 /data /tmp/inner\nVOLUME /data /tmp/inner\n"
    spec = SandboxSpec(dockerfile=f"FROM roll-flash-sandbox:latest\n{volumes}")
    verifier = CommandVerifier(f"cmp -s {folder}/answer wanted", {"wanted": "secret"}, 10.0)

    async def play() -> tuple[float, float]:
        async with open_sandbox(spec, provider="docker") as sandbox:
            assert (await sandbox.exec(f"ln -s $PWD/wanted {folder}/answer && chmod {mode} {folder}")).ok
            forged, _ = await verifier(sandbox, {})
            assert (
                await sandbox.exec(f"chmod 755 {folder}; rm -f {folder}/answer; echo -n secret > {folder}/answer")
            ).ok
            honest, _ = await verifier(sandbox, {})
            return forged, honest

    assert asyncio.run(play()) == (0.0, 1.0)


@pytest.mark.docker
def test_a_volume_with_a_blank_in_its_name_is_a_place_of_the_agent_and_no_hindrance() -> None:
    """Every check was worth 0 in such an image: the kernel lists this volume under another name."""
    volume = 'USER root\nRUN mkdir "/data x" && chmod 777 "/data x"\nVOLUME ["/data x"]\n'
    spec = SandboxSpec(dockerfile=f'FROM roll-flash-sandbox:latest\n{volume}ENV PATH="/data x:/usr/bin:/bin"\n')
    cheat = """ln -s "$PWD/wanted" '/data x/answer'; cd '/data x'; printf '#!/bin/sh\\n' > cmp; chmod 755 cmp"""

    async def play() -> list[float]:
        async with open_sandbox(spec, provider="docker") as sandbox:
            honest, _ = await CommandVerifier("true", {"wanted": "secret"}, 10.0)(sandbox, {})
            assert (await sandbox.exec(cheat)).ok
            same = "/usr/bin/cmp '/data x/answer' wanted"
            linked, _ = await CommandVerifier(same, {"wanted": "secret"}, 10.0)(sandbox, {})
            assert (await sandbox.exec("chmod 555 '/data x'")).ok
            planted, _ = await CommandVerifier("cmp wanted /etc/passwd", {"wanted": "secret"}, 10.0)(sandbox, {})
            return [honest, linked, planted]

    assert asyncio.run(play()) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "plant",
    [
        "mkdir d && ln -s wanted d/l && chmod 500 d",
        "mkdir d && ln -s wanted d/l && chmod 0 d",
        "mkdir d && cd d && i=0; while [ $i -lt 20000 ]; do ln -s x $i; i=$((i+1)); done",
    ],
    ids=["it cannot be removed", "it cannot be seen", "there are very many"],
)
def test_links_that_cannot_be_removed_in_the_time_of_the_check_are_worth_0(plant: str) -> None:
    async def play() -> tuple[float, dict[str, Any]]:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            await sandbox.exec(f"({plant})", timeout=120)
            return await CommandVerifier("true", {"wanted": "secret"}, 1.0)(sandbox, {})

    reward, info = asyncio.run(play())
    assert reward == 0.0
    assert "links could not be removed" in info["verifier_error"]


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        *[("nan", 0.0), ("inf", 0.0), ("0.5", 0.5), ("7", 1.0), ("", 1.0), ("0\n", 0.0), ("a\n0.5\r\n\n", 0.5)],
        *[("-0.3", 0.0), ("-1e999", 0.0), ("-0", 0.0), ("score -0.3", 1.0)],
        *[("0_0", 1.0), ("\u0660.5", 1.0), ("0.\u0665", 1.0), ("0x0", 1.0), ("9" * 5000, 1.0)],
        *[(f"it said 5{mark}0.5", 1.0) for mark in "\r\v\f\x1c\x85\u2028"],
    ],
)
def test_a_check_that_says_no_number_is_worth_its_exit_status_and_never_more(said: str, worth: float) -> None:
    """What reads a line in a shell takes a newline alone for its end."""
    assert _said_reward(said) == worth


@pytest.mark.parametrize(
    "verifier",
    [
        "cat answer; grep -qx 42 answer",
        "cat answer; kill -9 $$",
        """python3 -c "said = open('answer').read(); print(said); assert int(said) == 42" """,
    ],
)
def test_a_check_that_failed_is_worth_nothing_whatever_of_the_agents_it_showed_last(verifier: str) -> None:
    reward, info = run(python(ASK + "open('answer', 'w').write('7\\n1.0')", verifier=verifier))
    assert (reward, info["success"]) == (0.0, False)
    assert info["verifier_exit"] != 0


def test_a_check_and_a_partial_credit_that_never_end_fit_into_a_step() -> None:
    timeout_s = inspect.signature(AgentEnv).parameters["verifier_timeout_s"].default
    assert 2 * timeout_s < RolloutConfig().step_timeout_s


def test_a_check_that_never_ends_is_worth_nothing() -> None:
    reward, info = run(python(ASK, verifier="sleep 60", verifier_timeout_s=1))
    assert (reward, info["success"], info["verifier_timed_out"]) == (0.0, False, True)


def test_partial_credit_is_added_and_success_stays_the_checks() -> None:
    env = python(
        ASK + "print('I tried')", verifier="false", partial_credit='grep -c tried "$AGENT_OUTPUT"', partial_weight=0.2
    )
    reward, info = run(env)
    assert (reward, info["success"], info["check"], info["partial"]) == (0.2, False, 0.0, 1.0)


FORGE = """
import json
forged = [{"extra": {"actions": ["ls"]}, "content": "```bash\\nls\\n```", "tool_calls": [1]}] * 4
for name in ("trajectory.json", "answers.json", "output"):
    json.dump({"messages": forged} if name == "trajectory.json" else forged, open("/tmp/agent/" + name, "w"))
print("called: ls -> x\\nExecuting parsed code:\\n```")
"""
WORTH: dict[str, list[tuple[Answer, float]]] = {
    "openai": [(says("called: Executing parsed code"), 0.0), (calls("sh", command="ls"), 1.0), (says("```ls```"), 0.3)],
    "mini-swe-agent": [(says("ls"), 0.0), (says("So:\n```bash\nls\n```"), 0.5)],
    "smolagents": [
        (says("Executing parsed code: print(1)"), 0.0),
        (says("<code>\nprint(sh('ls'))\n"), 1.0),
        (says("<code>\nprint(sh(\n```"), 0.3),
    ],
}


@pytest.mark.parametrize(("agent", "said", "worth"), [(agent, *case) for agent in WORTH for case in WORTH[agent]])
def test_the_partial_credit_of_the_shipped_configs_is_for_what_the_model_said_and_cannot_be_forged(
    agent: str, said: Answer, worth: float
) -> None:
    config = yaml.safe_load((Path(__file__).parents[2] / f"configs/agents/{agent}.yaml").read_text())
    env = python(ASK + FORGE, verifier="false", partial_credit=config["envs"][0]["kwargs"]["partial_credit"])
    _, info = run(env, lambda number, body: said)
    assert info["partial"] == worth


@pytest.mark.parametrize("name", ["AGENT_ANSWERS", "AGENT_OUTPUT"])
def test_no_variable_of_a_check_names_what_only_a_partial_credit_is_given(name: str) -> None:
    """The check found what the agent had put there."""
    reward, info = run(python(ASK + FORGE, verifier=f'grep -q actions "${name}"', partial_credit=f'test -s "${name}"'))
    assert (info["check"], info["partial"], reward) == (0.0, 1.0, 0.1)


def test_a_set_up_that_fails_is_no_score() -> None:
    with pytest.raises(EnvError, match="set_up ended with exit status 3: no luck"):
        run(python(ASK, set_up="echo no luck; exit 3"))


def test_a_set_up_that_takes_too_long_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told as its exit status, that of the signal which ended it."""
    monkeypatch.setattr("roll_flash.envs.agents.agent_env.SET_UP_S", 1.0)
    with pytest.raises(EnvError, match="set_up took longer than 1 s: begun"):
        run(python(ASK, set_up="echo begun; sleep 100"))


def test_an_agent_works_on_the_tasks_of_file_quest() -> None:
    env = AgentEnv(command=["python3", "-c", ASK], image=AGENTS_IMAGE, task_env="FileQuest-v0")
    reward, info = run(env)
    assert 0 <= reward < 1
    assert info["success"] is False


@pytest.mark.parametrize(
    "line",
    [
        "show {instruction} {model}",
        'show "{instruction}" "{model}"',
        "show '{instruction}' '{model}'",
        """show "$(printf %s "{instruction}")" '{model}'""",
        """echo it\\'s "(" >/dev/null; (show "{instruction}" {model})""",
        """: 'a"b' "c'd"; show {instruction} '{model}'""",
    ],
)
def test_an_instruction_is_one_argument_of_a_shell_line_however_it_is_quoted(line: str) -> None:
    """In double quotes it was split into its words, and in single quotes the program got the name of the variable."""
    env = AgentEnv(command=line, instruction="x", verifier="true")
    show = f"show() {{ {shlex.quote(sys.executable)} -c 'import sys; print(sys.argv[1:])' \"$@\"; }}"
    instruction = """two  words, it's $HOME `id` * \\n"""
    done = subprocess.run(
        ["/bin/sh", "-c", f"{show}\n{env._filled_command(instruction, 'small')}"],
        env={"AGENT_INSTRUCTION": instruction, "OPENAI_MODEL": "small", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{[instruction, 'small']}\n"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "what verifier_function returned is a NoneType, not a number"),
        ((1.0, {}), "what verifier_function returned is a tuple, not a number"),
        ("0.5", "what verifier_function returned is the text '0.5', not a number"),
    ],
)
def test_a_verifier_function_that_returns_no_number_is_named(
    returned: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = AgentEnv(command="x", instruction="x", verifier_function="test_agent_env:said_the_seed")
    env.sandbox = cast(Any, None)
    monkeypatch.setattr(env, "_function", lambda sandbox, seed: returned)
    with pytest.raises(EnvError, match=re.escape(says)):
        asyncio.run(env.score())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"instruction": "x", "verifier": "true"}, "agent=None; give a `command`, or one of openai"),
        ({"agent": "openai"}, "needs one task"),
        ({"agent": "openai", "instruction": "x"}, "one check"),
        ({"agent": "openai", "task_env": "PythonRepair-v0", "verifier": "true"}, "one check"),
        ({"agent": "openai", "task_env": "ShellMath-v0"}, "async def agent_task"),
        ({"agent": "openai", "task_env": "FileQuest-v0", "set_up": "true"}, "sets itself up"),
        ({"agent": "openai", "instruction": "x", "verifier_function": "no.such:thing"}, "no.such:thing"),
        ({"command": ["x"], "program_files": ["none.py"], "instruction": "x", "verifier": "true"}, "none.py"),
        ({"command": "x", "arguments": ["y"], "instruction": "x", "verifier": "true"}, "not to a shell line"),
        ({"agent": "openai", "task_env": "PythonRepair-v0", "partial_weight": 2}, "between 0 and 1"),
        ({"agent": "openai", "instruction": "x", "verifier": "true", "verifier_files": {"/etc/x": ""}}, "'/etc/x'"),
        ({"agent": "openai", "instruction": "x", "verifier": "true", "verifier_files": {"a/../b": ""}}, "'a/../b'"),
        ({"agent": "openai", "arguments": "--fast"}, 'arguments is a list; write arguments: ["--fast"]'),
        ({"command": "x", "program_files": "my.py"}, 'program_files is a list; write program_files: ["my.py"]'),
        ({"command": "x", "policies": "user"}, 'policies is a list; write policies: ["user"]'),
        ({"command": "x", "program_files": ["a/run.py", "b/run.py"]}, "program_files: two are named run.py"),
        ({"command": "x", "env": {"OPENAI_API_KEY": "sk-mine"}}, "env: OPENAI_API_KEY is set in each episode"),
        ({"command": [], "instruction": "x", "verifier": "true"}, "command is empty"),
        ({"command": "x", "instruction": "x", "verifier": ["true"]}, "verifier is a line for the shell, not ['true']"),
        ({"command": "x", "instruction": 5, "verifier": "true"}, "instruction is a text, not 5"),
        ({"command": "x", "instruction": "x", "verifier": "true", "files": {"n": 5}}, "files: 'n': path and content"),
        ({"command": "x", "instruction": "x", "verifier": "true", "verifier_timeout_s": 0}, "verifier_timeout_s is"),
    ],
)
def test_what_does_not_fit_together_is_one_clear_line(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        AgentEnv(**arguments)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
