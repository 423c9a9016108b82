"""Adapters: played with the real package where it is installed; where not, they say what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_flash.envs.adapters import reasoning_gym
from roll_flash.envs.adapters.textarena import games
from roll_flash.envs.check.checks import check_environment
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError, EnvError


@pytest.mark.parametrize(
    ("env_id", "module", "package"),
    [
        ("ReasoningGym-v0", "reasoning_gym", "reasoning-gym"),
        ("MiniWoB-v0", "miniwob", "miniwob"),
        ("TextArena-v0", "textarena", "textarena"),
        ("TextArenaDuel-v0", "textarena", "textarena"),
        ("TextWorldExpress-v0", "textworld_express", "textworld-express"),
        ("Verifiers-v0", "verifiers", "verifiers"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    env_id: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{env_id}: the package {package} .*pip install {package}"):
        make_env(env_id, **({"env": "any"} if env_id == "Verifiers-v0" else {}))


@pytest.mark.adapters
@pytest.mark.parametrize("dataset", ["basic_arithmetic", "leg_counting", "syllogism", "tower_of_hanoi"])
def test_a_data_set_of_reasoning_gym_is_fit_to_train_on(dataset: str) -> None:
    report = check_environment("ReasoningGym-v0", {"dataset": dataset}, seeds=3, timeout_s=120)
    assert report.ok, report.as_table()


NO_ANSWER_TOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Any of many answers is right."""


@pytest.mark.adapters
def test_every_data_set_of_reasoning_gym_can_be_played() -> None:
    """The same seed asks the same, saying nothing earns nothing, and the right answer, where one is told, earns 1."""
    from reasoning_gym.factory import DATASETS

    faults = [f"{name}: {fault}" for name in sorted(DATASETS) if (fault := fault_of(name))]
    assert not faults
    assert len(DATASETS) > 100


def fault_of(dataset: str) -> str:
    mixed = {"datasets": [{"name": name, "weight": 1} for name in ("leg_counting", "dice")]}
    env: Any = make_env("ReasoningGym-v0", dataset=dataset, config=mixed if dataset == "composite" else {})
    question, _ = env.reset(seed=3)
    if (nothing := env.step("")[1]) != 0.0:
        return f"saying nothing earns {nothing}"
    if env.reset(seed=3)[0] != question:
        return "the same seed asks something else"
    if dataset in NO_ANSWER_TOLD:
        with pytest.raises(EnvError, match="tells no answer"):
            env.oracle()
        return ""
    earned, info = (result := env.step(env.oracle()))[1], result[4]
    return "" if earned >= 1.0 and info["success"] else f"the right answer earns {earned}: {info}"


@pytest.mark.adapters
@pytest.mark.parametrize(("dataset", "always"), [("coin_flip", "0"), ("game_of_life_halting", "I do not know")])
def test_a_data_set_whose_scorer_is_wrong_is_warned_of(
    dataset: str, always: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails when the package has mended it: then take it out of `WRONG_SCORERS` and docs/adapters.md."""
    reasoning_gym._warn_of.cache_clear()
    make_env("ReasoningGym-v0", dataset="composite", config={"datasets": [{"name": dataset, "weight": 1}]})
    assert f"the scorer of the data set {dataset} is wrong" in caplog.text
    env: Any = make_env("ReasoningGym-v0", dataset=dataset)
    for seed in (1, 2, 3):
        env.reset(seed=seed)
        assert env.step(f"<answer>{always}</answer>")[1] == 1.0
    assert len(caplog.records) == 1


@pytest.mark.adapters
def test_copied_premises_are_a_conclusion_to_the_scorer_that_is_warned_of() -> None:
    """Fails when the package has mended it, as the test above."""
    env: Any = make_env("ReasoningGym-v0", dataset="propositional_logic")
    for seed in range(10):
        premises = re.findall(r"^\.?\d+\. (.*)$", env.reset(seed=seed)[0], re.MULTILINE)
        assert env.step(f"<answer>{'∧'.join(f'({each})' for each in premises)}</answer>")[1] == 1.0
    assert "propositional_logic" in reasoning_gym.WRONG_SCORERS


@pytest.mark.adapters
def test_a_way_to_24_with_other_numbers_than_the_question_has_earns_nothing() -> None:
    """The package's scorer counts an answer's numbers, and compares them with none."""
    env: Any = make_env("ReasoningGym-v0", dataset="puzzle24")
    for seed in range(10):
        env.reset(seed=seed)
        reward, info = (result := env.step("<answer>1*2*3*4</answer>"))[1], result[4]
        assert (reward, info["score_error"]) == (0.0, "the answer has other numbers than the question")
        assert env.step(env.oracle())[1] == 1.0


@pytest.mark.adapters
def test_what_the_scorer_of_24_rounds_to_24_earns_nothing() -> None:
    """It leaves out what is behind the point."""
    env: Any = make_env("ReasoningGym-v0", dataset="puzzle24")
    env.reset(seed=0)
    env.unwrapped._entry["metadata"]["numbers"] = [7, 7, 2, 1]
    for answer in ("7*7/2*1", "7*7/(2*1)", "(7 + 7 - 2)*1"):
        reward, info = (result := env.step(f"<answer>{answer}</answer>"))[1], result[4]
        assert (reward, info.get("score_error")) == (0.0, "the result is not 24"), answer
    env.unwrapped._entry["metadata"]["numbers"] = [6, 4, 1, 1]
    for answer in ("6*4*1/1", "6*4 + 1 - 1"):
        assert env.step(f"<answer>{answer}</answer>")[1] == 1.0, answer


@pytest.mark.adapters
def test_a_wrong_data_set_or_option_of_reasoning_gym_is_one_line() -> None:
    for kwargs in ({"dataset": "no_such"}, {"config": {"no_such": 1}}, {"config": {"min_terms": 9, "max_terms": 2}}):
        with pytest.raises(ConfigError, match="ReasoningGym-v0: dataset"):
            make_env("ReasoningGym-v0", **kwargs)


@pytest.mark.adapters
def test_an_answer_that_its_scorer_cannot_read_is_a_wrong_answer() -> None:
    env: Any = make_env("ReasoningGym-v0", dataset="prime_factorization")
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step("I do not know")
    assert (reward, terminated) == (0.0, True)
    assert "score_error" in info


@pytest.mark.adapters
@pytest.mark.parametrize(
    "dataset",
    [
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
        *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    ],
)
def test_an_answer_that_is_a_program_is_never_run(dataset: str, tmp_path: Path) -> None:
    """These scorers evaluate answers."""
    mark = tmp_path / "ran"
    env: Any = make_env("ReasoningGym-v0", dataset=dataset)
    for program in (f"open({str(mark)!r}, 'w')", f"[open({str(mark)!r}, 'w')]", "entry['answer']"):
        env.reset(seed=1)
        reward, info = (result := env.step(f"<answer>{program}</answer>"))[1], result[4]
        assert (reward, "not plain" in info["score_error"], mark.exists()) == (0.0, True, False)


@pytest.mark.adapters
def test_a_scorer_that_lacks_a_package_fails_the_episode_and_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = make_env("ReasoningGym-v0", dataset="prime_factorization")
    env.reset(seed=1)

    def lacking(**_: Any) -> float:
        raise ModuleNotFoundError("No module named 'sympy'")

    monkeypatch.setattr(env.unwrapped._dataset, "score_answer", lacking)
    with pytest.raises(EnvError, match=r"scorer of the data set prime_factorization: .* 'sympy'"):
        env.step("<answer>2</answer>")


@pytest.mark.adapters
@pytest.mark.parametrize("game", ["GuessTheNumber-v0", "FrozenLake-v0", "TowerOfHanoi-v0"])
def test_a_single_player_game_of_textarena_is_fit_to_train_on(game: str) -> None:
    report = check_environment("TextArena-v0", {"game": game}, seeds=2, timeout_s=120)
    assert report.ok, report.as_table()


@pytest.mark.adapters
def test_a_game_of_textarena_is_won_by_the_right_moves_and_told_without_repetition() -> None:
    env: Any = make_env("TextArena-v0", game="GuessTheNumber-v0")
    env.reset(seed=5)
    low, high, reward, terminated, info = 1, 20, 0.0, False, {}
    while not terminated:
        guess = (low + high) // 2
        said, reward, terminated, _, info = env.step(f"I try [{guess}]")
        assert "You are playing" not in said
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    assert (reward, info["success"]) == (1.0, True)


@pytest.mark.adapters
@pytest.mark.parametrize(("game", "earned"), [("Bandit-v0", 0.0), ("Set-v0", 20.0)])
def test_a_game_whose_reward_is_wrong_is_warned_of(game: str, earned: float, caplog: pytest.LogCaptureFixture) -> None:
    """Fails when the package has mended it: then take it out of `WRONG_GAMES` and docs/adapters.md."""
    games._warn_of.cache_clear()
    for seed in (1, 2, 3):
        env: Any = make_env("TextArena-v0", game=game, max_turns=30)
        env.reset(seed=seed)
        buttons = env.unwrapped._game._game.state.game_state.get("ground_truth", {})
        best = max(buttons, key=buttons.get) if buttons else "1, 1, 1"
        terminated = False
        while not terminated:
            _, reward, terminated, truncated, _ = env.step(f"[{best}]")
            assert not truncated
        assert reward == earned
    assert [f"the reward of the game {game[:-3]} is wrong" in line for line in caplog.messages] == [True]


@pytest.mark.adapters
def test_a_solved_fifteen_puzzle_and_an_unsolved_cryptarithm_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Fails when the package has mended one: then take it out of `WRONG_GAMES` and docs/adapters.md."""
    games._warn_of.cache_clear()
    puzzle: Any = make_env("TextArena-v0", game="FifteenPuzzle-v0")
    puzzle.reset(seed=1)
    puzzle.unwrapped._game._game.board[:] = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, None, 15]]
    assert puzzle.step("[left]")[1:3] == (0.0, True)
    letters: Any = make_env("TextArena-v0", game="Cryptarithm-v0", max_turns=200)
    letters.reset(seed=1)
    moves = [f"[{letter} {digit}]" for digit, letter in enumerate("SENDMOR", 1)] + ["[R 8]", "[R 9]"] * 60
    assert next(step[1] for step in map(letters.step, moves) if step[2]) == pytest.approx(7 / 8)
    assert [line.split()[6] for line in caplog.messages] == ["FifteenPuzzle", "Cryptarithm"]


@pytest.mark.adapters
def test_a_game_for_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="number of players has to be 2"):
        make_env("TextArena-v0", game="TicTacToe-v0")
