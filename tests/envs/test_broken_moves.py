"""What a player writes may make a game of others raise: that is a wrong move, and the sample is kept.

The game here reads numbers as those of textarena do; the package itself is played with in test_adapters.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from roll_flash.envs.adapters.textarena import game as textarena_game
from roll_flash.envs.adapters.textarena.duel import TextArenaDuel
from roll_flash.envs.adapters.textarena.games import TextArena
from roll_flash.errors import EnvError

UNKNOWN = "[seven]"
WRONG = "[wrong]"
ENDLESS = "[for ever]"
SLOW_SEED = 99


class Guess:
    """Whoever says [3] wins."""

    def reset(self, num_players: int, seed: int) -> None:
        begun = time.thread_time()
        while seed == SLOW_SEED and time.thread_time() < begun + 0.3:
            pass
        self.players = num_players
        self.state = SimpleNamespace(current_player_id=0)
        self.rewards: dict[int, float] = {}

    def get_observation(self) -> tuple[int, list[Any]]:
        return self.state.current_player_id, [(-1, "Guess.", None)]

    def step(self, text: str) -> tuple[bool, dict[str, Any]]:
        if text == "[words]":
            raise LookupError("nltk's words are not there")
        re.search(r".*\[(?:col\s*)?(\d+)\].*", text)
        re.search(r"\[Offer:?\s*(?:I\s+(?:give|offer)\s+)?([^\[\]]+?)\s*\.*\]", text, re.DOTALL)
        found = re.search(r"\[(\d+)\]", text)
        if text == UNKNOWN:
            raise KeyError(text)
        while text == ENDLESS:
            with contextlib.suppress(Exception):
                time.sleep(0)
        player = self.state.current_player_id
        if text == WRONG:
            self.rewards = {player: "Bad action format."}  # type: ignore[dict-item]
        if found and int(found[1]) == 3:
            self.rewards = {other: 1.0 if other == player else -1.0 for other in range(self.players)}
        self.state.current_player_id = (player + 1) % self.players
        return bool(self.rewards), {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return self.rewards, {}


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(ObservationType=SimpleNamespace(PLAYER_ACTION="action"))
    package = SimpleNamespace(make=lambda game, **_: Guess(), core=kinds)
    monkeypatch.setattr(textarena_game, "import_optional", lambda *_, **__: package)


def test_a_move_for_which_a_game_raises_earns_nothing_and_is_a_sample() -> None:
    env = TextArena()
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step(UNKNOWN)
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert "KeyError" in info["reason"]
    env.reset(seed=1)
    assert env.step("[3]")[1] == 1.0
    env.reset(seed=1)
    with pytest.raises(LookupError):  # that the package's data is missing is not the model's doing
        env.step("[words]")


@pytest.mark.parametrize("long", ["[Offer" + " " * 3_000, "[Offer" + "\n x" * 10_000, "x" * 30_000, "[1" * 15_000])
def test_a_long_move_holds_up_no_worker(long: str) -> None:
    env = TextArena()
    env.reset(seed=1)
    began = time.process_time()
    env.step(long)
    assert time.process_time() - began < 1
    assert env.step(f"{long} so: [3]")[1] == 1.0


def test_a_move_that_a_game_never_comes_to_an_end_with_is_lost_and_no_other_game_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of textarena when the last player has been eliminated. All games of a process share a lock."""
    monkeypatch.setattr(textarena_game, "MOVE_S", 0.2)
    monkeypatch.setattr(textarena_game, "LOOK_S", 0.05)

    async def play() -> tuple[float, dict[str, Any]]:
        env = TextArenaDuel(opponent=lambda messages: "[1]", seat=0)
        await env.reset(seed=2)
        _, reward, _, _, info = await env.step(ENDLESS)
        return reward, info

    reward, info = asyncio.run(play())
    assert (reward, info["success"], "it took more than 0.2 s" in info["reason"]) == (-1.0, False, True)
    other = TextArena()
    other.reset(seed=1)
    assert other.step("[3]")[1] == 1.0


def test_a_game_may_take_longer_to_begin_than_a_move_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """No player causes that: a hard Sudoku of textarena takes seconds until it is found."""
    monkeypatch.setattr(textarena_game, "MOVE_S", 0.1)
    monkeypatch.setattr(textarena_game, "LOOK_S", 0.05)
    env = TextArena()
    env.reset(seed=SLOW_SEED)
    assert env.step("[3]")[1] == 1.0


def test_a_wrong_move_whose_reason_a_game_gives_as_the_reward_earns_nothing_and_is_a_sample() -> None:
    """As Countdown, Slitherlink and Cryptarithm of textarena 0.7.4 do."""
    env = TextArena()
    env.reset(seed=1)
    _, earned, terminated, _, info = env.step(WRONG)
    assert (earned, terminated, info["success"]) == (0.0, True, False)


def test_a_move_for_which_a_game_for_two_raises_is_lost() -> None:
    async def play(seat: Any, says: str, opponent_says: str) -> tuple[float, dict[str, Any]]:
        env = TextArenaDuel(opponent=lambda messages: opponent_says, seat=seat)
        await env.reset(seed=2)
        _, reward, terminated, _, info = await env.step(says)
        assert terminated
        assert await env.conclude() == (reward, info)
        return reward, info

    reward, info = asyncio.run(play(0, UNKNOWN, "[1]"))
    assert (reward, info["success"]) == (-1.0, False)
    assert asyncio.run(play(0, "[3]", "[1]"))[0] == 1.0
    with pytest.raises(EnvError, match="other seat"):
        asyncio.run(play(0, "[1]", UNKNOWN))


def test_with_both_seats_the_one_for_whose_move_a_game_raises_has_lost() -> None:
    async def play(*moves: str) -> dict[str, float]:
        env = TextArenaDuel(seat="both")
        await env.reset(seed=2)
        for move in moves:
            await env._move(move)
        rewards, info = await env.score()
        assert isinstance(rewards, dict)
        assert UNKNOWN not in moves or "KeyError" in info["reason"]
        return rewards

    assert asyncio.run(play("[1]", UNKNOWN)) == {"player_0": 0.0, "player_1": -1.0}
    assert asyncio.run(play(UNKNOWN)) == {"player_0": -1.0, "player_1": 0.0}
    assert asyncio.run(play("[1]", "[3]")) == {"player_0": -1.0, "player_1": 1.0}
    assert asyncio.run(play("[1]", "[1]")) == {"player_0": 0.0, "player_1": 0.0}
