"""The other columns of benchmarks/rollout.py: verifiers in a virtual environment of its own, and a bare loop.

Both play the same episodes against the same mock servers: the same four turns, the same texts. verifiers uses its
OpenAI-compatible client and asks for no logprobs, which is in its favour; it keeps no token ids. The bare loop sends
token ids with aiohttp, reads the answer, and does nothing else: no environment, no tokenizer, no counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from rollout_engine import Measured, answer_token_ids
from rollout_env import OBSERVATION, QUESTION, TURNS

VERIFIERS_VERSION = "0.1.14"
PEERS = Path.home() / ".cache" / "roll-flash" / "peers"
INSTALL_TIMEOUT_S = 600
RUN_TIMEOUT_S = 600

VERIFIERS_PROGRAM = """
import asyncio, json, os, sys, time
import verifiers as vf
from datasets import Dataset

url, concurrent, rollouts, turns, question, observation = sys.argv[1:]
concurrent, rollouts, turns = int(concurrent), int(rollouts), int(turns)
os.environ["MOCK_KEY"] = "none"

class FourTurns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": observation}]

async def reward(completion, **kwargs):
    return 1.0

def episodes(count):
    prompts = [[{"role": "user", "content": f"Maze {seed}. {question}"}] for seed in range(count)]
    return Dataset.from_dict({"prompt": prompts, "answer": [""] * count})

async def play(client, count):
    env = FourTurns(max_turns=turns, eval_dataset=episodes(count), rubric=vf.Rubric(funcs=[reward]))
    results = await env.evaluate(client, model="mock", max_concurrent=concurrent, independent_scoring=True,
                                 sampling_args={"max_tokens": 64}, on_progress=[])
    outputs = results["outputs"]
    assert len(outputs) == count, len(outputs)
    assert all(output["reward"] == 1.0 and not output.get("error") for output in outputs), outputs[0]

async def main():
    client = vf.ClientConfig(client_type="openai_chat_completions", api_base_url=url + "/v1", api_key_var="MOCK_KEY")
    await play(client, min(64, rollouts))
    began, cpu = time.perf_counter(), time.process_time()
    await play(client, rollouts)
    print(json.dumps({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}))

asyncio.run(main())
"""

BARE_PROGRAM = """
import asyncio, json, sys, time
import aiohttp, uvloop

url, answer = sys.argv[1], json.loads(sys.argv[5])
concurrent, rollouts, turns = map(int, sys.argv[2:5])

async def episode(session, number):
    token_ids = list(range(60))
    for turn in range(turns):
        body = {"request_id": f"{number}-{turn}", "token_ids": token_ids, "sampling_params": {"max_tokens": 64}}
        async with session.post(url + "/inference/v1/generate", json=body) as response:
            choice = json.loads(await response.read())["choices"][0]
        assert choice["token_ids"] == answer
        token_ids = token_ids + choice["token_ids"] + list(range(30))

async def play(session, count):
    numbers = iter(range(count))
    async def slot():
        for number in numbers:
            await episode(session, number)
    await asyncio.gather(*(slot() for _ in range(concurrent)))

async def main():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await play(session, concurrent)
        began, cpu = time.perf_counter(), time.process_time()
        await play(session, rollouts)
        print(json.dumps({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}))

uvloop.run(main())
"""


def bare_loop(url: str, concurrent: int, rollouts: int) -> Measured:
    arguments = [url, str(concurrent), str(rollouts), str(TURNS), json.dumps(answer_token_ids())]
    return _run(sys.executable, BARE_PROGRAM, arguments, concurrent, rollouts)


def verifiers(url: str, concurrent: int, rollouts: int) -> Measured | None:
    """None, with a line that says why, if it cannot be installed."""
    python = _verifiers_python()
    if python is None:
        return None
    arguments = [url, str(concurrent), str(rollouts), str(TURNS), QUESTION, OBSERVATION]
    return _run(python, VERIFIERS_PROGRAM, arguments, concurrent, rollouts)


def _run(python: str, program: str, arguments: Sequence[str], concurrent: int, rollouts: int) -> Measured:
    """Runs a program that prints its wall and CPU seconds as its last line."""
    command = [python, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the peer failed: {done.stderr.strip()[-1000:]}")
    took = json.loads(done.stdout.strip().splitlines()[-1])
    return Measured(
        concurrent=concurrent,
        rollouts=rollouts,
        seconds=took["seconds"],
        rollouts_per_s=rollouts / took["seconds"],
        cpu_ms_per_turn=1e3 * took["cpu_s"] / (rollouts * TURNS),
    )


def _verifiers_python() -> str | None:
    folder = PEERS / f"verifiers-{VERIFIERS_VERSION}"
    python = str(folder / "bin" / "python")
    if not _has_verifiers(python):
        print(f"installing verifiers {VERIFIERS_VERSION} in {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        install = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            f"verifiers=={VERIFIERS_VERSION}",
        ]
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
        if done.returncode:
            print(f"verifiers could not be installed: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return None
    return python


def _has_verifiers(python: str) -> bool:
    if not Path(python).exists():
        return False
    look = f"from importlib.metadata import version; raise SystemExit(version('verifiers') != '{VERIFIERS_VERSION}')"
    return subprocess.run([python, "-c", look], capture_output=True, timeout=60, check=False).returncode == 0
