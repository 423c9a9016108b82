"""An answer that a package's scorer evaluates as Python is data or arithmetic, never a program in the worker.

The scorers here do as those of reasoning-gym do, with the real sympy; the package itself is played with in
test_adapters.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]

from roll_flash.config.tree import RolloutConfig
from roll_flash.envs.adapters.reasoning_gym import ReasoningGym
from roll_flash.envs.rewards import evaluated_answers, scoring_process
from roll_flash.envs.rewards.evaluated_answers import UnsafeAnswerError, check_answer
from roll_flash.envs.rewards.functions import REWARD_TIMEOUT_S
from roll_flash.envs.rewards.scoring_process import (
    LINGER_S,
    ScoringEndedError,
    register_user,
    score_in_subprocess,
    unregister_user,
)
from roll_flash.errors import EnvError

ARITHMETIC = (
    "import sympy\nclass Arithmetic:\n    def score(self, answer): return int(sympy.parse_expr(answer)) == 24\n"
)
DATA = (
    "class Data:\n    def score(self, answer):\n        oracle_answer = 'x'\n"
    "        return ' '.join(map(str, eval(answer)))\n"
)
WORDS = "class Words:\n    def score(self, answer): return answer == 'evaluate (me)'\n"


def scorer(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object of the class in a module of its own."""
    name = f"scorer_{source.partition('class ')[2].partition(':')[0].lower()}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(name)
    return next(value for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == name)()


PROGRAMS = [
    "__import__('os').system('touch {mark}')",
    "open('{mark}', 'w')",
    "[open('{mark}', 'w')]",
    'eval(\'open("{mark}", "w")\')',
    "(eval)(\"open('{mark}', 'w')\")!",
    "sin(\"open('{mark}', 'w')\")",
    "sin('1')",
    "Symbol('x')",
    'S(\'open("{mark}", "w")\')',
    "x.__class__",
    "(lambda: open('{mark}', 'w'))()",
    "[open('{mark}', 'w') for x in [1]]",
    "f\"{{open('{mark}', 'w')}}\"",
    "abs(x := open('{mark}', 'w'))",
    "sin(*[open('{mark}', 'w')])",
    "sin(x, evaluate=open('{mark}', 'w'))",
    "1 if open('{mark}', 'w') else 2",
    "entry['answer'].split()",
    "print",
    "{**{}}",
    "{open('{mark}', 'w'): 1}",
    "\uff4f\uff50\uff45\uff4e('{mark}', 'w')",
    "[" * 4000 + "]" * 4000,
    "-" * 4000 + "1",
    "1" * 6000,
]
BOMBS = [
    "9**9**9",
    "(9**99)**99",
    "9**(9**9)",
    "2**-(10**9)",
    "exp(exp(exp(99)))",
    "sin(9**9**9)",
    "1e999",
    "1e-999999999",
    "x*.5E-9_999_999",
    "*".join(["9**99"] * 99),
]


@pytest.mark.parametrize("answer", PROGRAMS)
@pytest.mark.parametrize("source", [ARITHMETIC, DATA])
def test_no_program_in_an_answer_is_run(
    answer: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    said = answer.replace("{mark}", str(mark)).replace("{{", "{").replace("}}", "}")
    scores = scorer(source, tmp_path, monkeypatch)
    with contextlib.suppress(UnsafeAnswerError, SyntaxError):
        check_answer(said, scores)
        scores.score(said)
    assert not mark.exists()


@pytest.mark.parametrize("answer", BOMBS)
def test_no_number_in_an_answer_takes_for_ever(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsafeAnswerError, match="not plain arithmetic"):
        check_answer(answer, scorer(ARITHMETIC, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (
            ARITHMETIC,
            ["(5 + 3) * 3", "-3*X**3*sin(X) - 9*X**2*cos(X)/2 + 18*X*sin(X) + C", "6*x**8 + 3.5*x*y - 12", "exp(2*x)"],
        ),
        (
            DATA,
            [
                "[[1, 0], [-1, 'a']]",
                "Q _ _\n_ Q _",
                "()",
                "1 0\n0 1",
                "EEBCED",
                '{"a": [true, null, 1.5]}',
                "I think (perhaps) open(x) is it",
            ],
        ),
        (WORDS, ["evaluate (me)", "__import__('os')", "9**9**9", "a" * 9000]),
    ],
)
def test_answers_of_the_kind_that_is_asked_for_reach_the_scorer(
    source: str, answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in answers:
        check_answer(answer, scorer(source, tmp_path, monkeypatch))


@pytest.mark.parametrize("answer", ["oracle_answer", "[oracle_answer]", "self", "__builtins__", "open", "{1: answer}"])
def test_no_name_of_the_scorers_own_is_an_answer(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its frame stands the right answer."""
    with pytest.raises(UnsafeAnswerError, match="not plain data"):
        check_answer(answer, scorer(DATA, tmp_path, monkeypatch))


@pytest.mark.parametrize("number", ["0x7b", "0b1111011", "1_23", ".123e3", "1.23E2", "123j", "0*(3) + 123 # 5 7 9"])
def test_no_number_is_hidden_from_scorers_that_look_for_those_of_an_answer(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of `countdown`, where each number that is given is to be used once."""
    with pytest.raises(UnsafeAnswerError, match="not plain arithmetic"):
        check_answer(f"0*(3 + 5 + 7 + 9) + {number}", scorer(ARITHMETIC, tmp_path, monkeypatch))
    check_answer("x1e5 + 2*x - 3.5*x2 + 10", scorer(ARITHMETIC, tmp_path, monkeypatch))


class SimpleUser:
    """Of the process in which answers are scored."""


@pytest.fixture
def user() -> Iterator[SimpleUser]:
    one = SimpleUser()
    register_user(one)
    yield one
    unregister_user(one)


SCORERS = {
    # Read at once by sympy, and simplified for ever.
    "simplifies": ("float(sympy.simplify(sympy.parse_expr(answer) - 3) == 0)", "(a + b + c + d + e + f + g + h)**50"),
    # As that of `coin_flip`, which holds the interpreter's lock for ever.
    "reads a fraction": ("float(fractions.Fraction(answer))", "1e999999999"),
    # As that of `rubiks_cube`, which takes 16 GB.
    "repeats": ("len([answer] * int(answer))", "2000000000"),
}


@pytest.mark.parametrize("how", list(SCORERS))
def test_an_answer_that_takes_for_ever_or_all_memory_is_worth_nothing_and_holds_up_nobody(
    how: str, user: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expression, answer = SCORERS[how]
    name = f"scorer_that_{how.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(f"import fractions, sympy\ndef score(answer):\n    return {expression}\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    assert score_in_subprocess(lambda: 1, modules=("sympy",)) == 1  # the process that forks is there
    began = time.process_time()
    with pytest.raises(ScoringEndedError, match=r"more than 0\.5 s or"):
        score_in_subprocess(lambda: module.score(answer), seconds=0.5)
    assert time.process_time() - began < 2, "the answer would take minutes"
    assert score_in_subprocess(lambda: module.score("3")) in (1.0, 3.0)


def test_scorers_see_no_key_of_the_run_and_their_process_ends_for_want_of_users(
    user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_process, "_server", None)
    monkeypatch.setenv("RUN_KEY", "secret")
    assert score_in_subprocess(lambda: __import__("os").environ.get("RUN_KEY")) is None
    process = (scoring_process._server or pytest.fail("there is no process"))[0]
    other = SimpleUser()
    register_user(other)
    unregister_user(user)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(LINGER_S + 0.5)
    unregister_user(other)
    assert process.wait(20) == 0
    assert score_in_subprocess(lambda: [1, "a"]) == [1, "a"], "another one takes its place"


def test_a_crowd_of_answers_that_take_for_ever_is_scored_within_a_step_and_leaves_the_worker_its_place(
    user: Any,
) -> None:
    """Of 32 at once on two cores each took 80 s: no sample instead of 0, for their neighbours too; and 16 GB."""
    rollout = RolloutConfig()
    assert rollout.worker_threads * scoring_process.MAX_SCORING_S / 2 < rollout.step_timeout_s
    assert rollout.worker_threads * scoring_process.MEMORY_MB <= 4096
    assert score_in_subprocess(lambda: __import__("os").nice(0)) >= min(19, os.nice(0) + 10)


def test_a_process_that_ends_just_now_costs_no_answer(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of users, or of memory: what it was asked, and what it can be asked no more, is asked of another."""
    assert score_in_subprocess(lambda: 1) == 1
    process = (scoring_process._server or pytest.fail("there is no process"))[0]
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(process, "poll", lambda: None)  # as just before its end is seen
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    assert score_in_subprocess(lambda: 2) == 2
    process.wait(5)


def test_an_answer_for_which_a_busy_machine_has_no_time_is_worth_nothing_if_it_used_the_processor(
    user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many such answers at once hold up each other; no sample would be better for a policy than the 0 it deserves."""
    monkeypatch.setattr(scoring_process, "WAIT_S", 2.0)
    monkeypatch.setattr(scoring_process, "OWN_S", 0.02)

    def spins() -> None:
        while True:
            pass

    with pytest.raises(ScoringEndedError, match=r"not done after 2 s, .* on a processor"):
        score_in_subprocess(spins, seconds=300)
    with pytest.raises(EnvError, match="not done after 2 s: is the machine too busy"):
        score_in_subprocess(lambda: __import__("time").sleep(300), seconds=300)
    assert score_in_subprocess(lambda: 2) == 2


def test_the_wait_for_a_scorer_ends_before_the_time_out_of_its_reward() -> None:
    assert min(REWARD_TIMEOUT_S, RolloutConfig().step_timeout_s) > scoring_process.WAIT_S


ASKS_AND_IS_KILLED = """
import os, threading, time
from roll_flash.envs.rewards.scoring_process import score_in_subprocess

def work(to=os.path.abspath("pid")):
    import os, time
    with open(to, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

threading.Thread(target=score_in_subprocess, args=(work,), daemon=True).start()
while not (os.path.exists("pid") and open("pid").read()):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


def test_an_answer_is_not_scored_on_when_its_worker_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    asker = subprocess.run([sys.executable, "-c", ASKS_AND_IS_KILLED], cwd=tmp_path, env=environment, timeout=60)
    assert asker.returncode == -signal.SIGKILL
    scoring = Path("/proc", (tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while scoring.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not scoring.exists()


READS = """
class Reads:
    right = "here"
    def __getitem__(self, index):
        return {"question": "?", "answer": self.right, "metadata": {}}
    def score_answer(self, answer, entry):
        with open(answer if "/" in answer else __file__) as file:
            return float(file.read() != "")
"""


def test_an_answer_that_its_scorer_fails_on_as_on_no_right_one_is_worth_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample would be better for a policy than the 0 it deserves. That a scorer always fails is nobody's fault."""
    reads = scorer(READS, tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=lambda *a, **k: reads))
    env = ReasoningGym()
    env.reset(seed=1)
    assert env.step("here")[1] == 1.0
    _, reward, _, _, info = env.step("/not/there")
    assert (reward, info["success"]) == (0.0, False)
    assert "FileNotFoundError" in info["score_error"]
    reads.right = "/nor/there"
    env.reset(seed=1)
    with pytest.raises(EnvError, match="FileNotFoundError"):
        env.step("/not/there")
    env.close()


@pytest.mark.parametrize(
    "forged",
    [
        "(3 + 5 + 7 + 9)*(True - True) + True + True",
        "(3 + 5 + 7 + 9)*(x - x) + x/x + x/x",
        "(3 + 5 + 7 + 9)*(E - E) + log(E) + log(E)",
        "3.5*7*9",
    ],
)
def test_no_number_is_made_of_what_is_none(forged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `countdown` and `puzzle24`, which ask for a number from those that are given."""
    numbers = scorer(ARITHMETIC, tmp_path, monkeypatch)
    with pytest.raises(UnsafeAnswerError, match="not plain arithmetic"):
        check_answer(forged, numbers, "(9 - 7)*3 + 5 - -1")
    check_answer("-3*(5 + 7)/9", numbers, "(9 - 7)*3 + 5")
    check_answer("x**2/2 + log(x) + C", numbers, "x + C")


NANS = ["nan", "-NaN", "1 + nanj", "1+nani", "NaNi", "n a n", "(na\tn)", "Infinity", "inf", "(nan)", "infinityj"]
HIDDEN_NANS = [
    '["\\u006ean", "n\\u0061n"]',
    "['\\x6ean']",
    "['\\156an']",
    "['na\\\nn']",
    "['\\N{LATIN SMALL LETTER N}an']",
]


@pytest.mark.parametrize("answer", NANS + HIDDEN_NANS)
def test_nan_is_not_the_right_number(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `complex_arithmetic`, whose `min(1.0, nan)` is 1.0 and which takes blanks out, and for `number_sorting`,
    which makes numbers of the strings of a JSON list."""
    words = scorer(WORDS, tmp_path, monkeypatch)
    with pytest.raises(UnsafeAnswerError, match="no finite number"):
        check_answer(answer, words, "3.5 + 2i")
    check_answer("information, banana: 3", words, "3")
    check_answer("can infer, \\frac{3}{2} \\nu \\\\\n3 \\\\4, \\u00e9", words, "3")
    check_answer(answer, words, "inf, nan")


FAR = """
class Far:
    def __getitem__(self, index):
        return {"question": "?", "answer": "-1", "metadata": {}}
    def score_answer(self, answer, entry):
        import math
        return math.exp(-5 * abs(int(answer) + 1) / -1)
"""


def test_a_score_that_is_none_is_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `calendar_arithmetic`: the further from a right answer of -1, the more."""
    far = scorer(FAR, tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=lambda *a, **k: far))
    env = ReasoningGym()
    env.reset(seed=1)
    assert env.step("-1")[1] == 1.0
    for answer in ("0", "99", "-9"):
        _, reward, _, _, info = env.step(answer)
        assert (reward, info["success"]) == (0.0, False)
        assert "not from 0 to 1" in info["score_error"]
    env.close()


def test_what_is_let_through_is_evaluated_quickly() -> None:
    """The largest numbers that are allowed, with the real sympy."""
    began = time.process_time()
    for answer in ("9**99 * 9**99 * 9**99 * 9**99", "(x + 1)**9 * (y + 1)**9", "sin(99) + exp(9)", "2.5**-99"):
        assert evaluated_answers._bits(evaluated_answers._parsed(answer)) <= evaluated_answers.MAX_BITS  # type: ignore[arg-type]
        sympy.parse_expr(answer)
    assert time.process_time() - began < 5


def test_a_program_as_an_answer_earns_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the question comes from a part of a mixture."""
    mark = tmp_path / "ran"
    part = scorer(DATA, tmp_path, monkeypatch)
    part.score_answer = lambda answer, entry: 1.0 if part.score(answer) else 0.0
    mixture = scorer(WORDS, tmp_path, monkeypatch)
    mixture.datasets = {"data": part}
    mixture.score_answer = lambda answer, entry: part.score_answer(answer, entry)
    mixture.__class__.__getitem__ = lambda self, index: {
        "question": "?",
        "answer": "[1]",
        "metadata": {"source_dataset": "data"},
    }
    monkeypatch.setitem(
        __import__("sys").modules, "reasoning_gym", SimpleNamespace(create_dataset=lambda *a, **k: mixture)
    )
    env = ReasoningGym()
    env.reset(seed=1)
    _, reward, _, _, info = env.step(f"<answer>[open({str(mark)!r}, 'w')]</answer>")
    assert (reward, info["success"], mark.exists()) == (0.0, False, False)
    assert info["score_error"] == "the answer is not scored: it is not plain data"
    env.reset(seed=1)
    assert env.step("<answer>[1, 2]</answer>")[1] == 1.0
    env.reset(seed=1)
    assert env.step("1, " * 1000)[4]["score_error"] == "the answer is longer than 2000 characters"
    env.close()
    assert env not in scoring_process._users
