"""TextArenaDuel-v0: any two-player game of the package textarena, against an opponent or the policy itself.

One episode is one seat: it trains on the tokens and the reward of that seat. The seed decides the seat, so all
replicas of a group play the same side of the same game and are compared only with each other: the advantage of the
first mover cancels (the role-conditioned baseline of SPIRAL, arXiv 2506.24119, without its running estimate).
In self-play the other seat also uses the newest weights, but is neither recorded nor trained on; across seeds the
policy trains on both seats. With `seat: both` one episode trains both: each seat is a role with its own reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from roll_flash.chat.model_text import without_thinking
from roll_flash.chat.openai_client import EndpointRefusedError, OpenAIChatClient
from roll_flash.envs.adapters.textarena.game import Game, GameRaisedError
from roll_flash.envs.adapters.textarena.opponents import SELF, Move, Opponent, make_opponent
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.base import Env, StepResult
from roll_flash.errors import ConfigError, EnvError, InferenceError
from roll_flash.processes.background import call_in_thread
from roll_flash.types import Message

Seat = Literal["by seed", "both", 0, 1]
ROLES = ("player_0", "player_1")
MAX_OPENINGS = 10
MAX_OPPONENT_TURNS = 200
"""Maximum consecutive turns of the opponent; a game with more has hung."""
TURNS_USED_UP = 403
"""HTTP status of the gateway at the turn limit: the game is then scored in its current state."""
NOT_TAKEN = (400, 413)
"""HTTP statuses of the gateway for a conversation that it does not take. What the players wrote decides that, so the
game ends as if the context were full: a seat that loses could cause it, and there would be no sample."""
CALL_TIMEOUT_S = 600.0
"""Timeout in seconds of one model call in self-play; the gateway's own deadline is shorter."""


class TextArenaDuel(Env):
    """Arguments: `game` (an id of the package), `game_kwargs`, `max_turns` of a seat, `seat` (0, 1, `by seed`, or
    `both` to train both seats of a game in self-play), `opponent`:
    `self` (the policy that is trained), `random` (one of the moves that the game lists), a function of the messages
    (`module:function`, `path/to/file.py:function`), or `{url, model, api_key_env}` for a fixed model at an endpoint.

    Reward of the seat: 1 won, 0 drawn or not over after `max_turns`, -1 lost, or the game's own reward.
    """

    def __init__(
        self,
        game: str = "TicTacToe-v0",
        opponent: str | Mapping[str, Any] | Callable[..., Any] = SELF,
        seat: Seat = "by seed",
        game_kwargs: Mapping[str, Any] | None = None,
        max_turns: int = 20,
    ) -> None:
        if seat not in ("by seed", "both", 0, 1) or max_turns < 1:
            raise ConfigError("TextArenaDuel-v0: seat must be 0, 1, 'by seed' or 'both', and max_turns at least 1")
        if seat == "both" and opponent != SELF:
            raise ConfigError("TextArenaDuel-v0: seat=both has no other opponent; remove opponent")
        self.roles = ROLES if seat == "both" else ()
        self.needs_unrecorded_calls = not self.roles
        self._game = Game("TextArenaDuel-v0", game, game_kwargs or {}, players=2)
        self.runs_own_loop = opponent == SELF
        """True if the gateway answers for both seats (`play`); False if `step` is called for one seat."""
        self._opponent_named = opponent
        self._opponent: Opponent | None = None
        if not self.runs_own_loop:
            make_opponent(opponent, 0)  # raises for a wrong argument
        self._seat_rule = seat
        self._max_turns = max_turns
        self.seat = 0
        self._game_seed = 0
        self._turns = 0
        self._conversations: tuple[list[Message], list[Message]] = ([], [])
        self._is_over = False
        self._broken = ""
        """Reason why the game raised for a move of `_broken_by`, which counts as a loss."""
        self._broken_by = 0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        seed = 0 if seed is None else seed
        self.seat = seed % 2 if self._seat_rule == "by seed" else 0 if self.roles else int(self._seat_rule)
        self._game_seed = seed if self.roles else seed // 2
        await self._deal()
        if not self.runs_own_loop:
            await self.close()
            self._opponent = opponent = make_opponent(self._opponent_named, seed, lambda: self._game.last_said)
            await self._open(opponent.move)
        return self._add_new_messages(), {"seat": self.seat}

    async def step(self, action: str) -> StepResult:
        if self.runs_own_loop:
            raise EnvError("TextArenaDuel-v0: opponent=self is played by a run's gateway; here, give another opponent")
        await self._move(action)
        assert self._opponent is not None, "reset() comes first"
        is_cut_off = self._turns >= self._max_turns
        try:
            await self._await_turn(self._opponent.move)
        except EndpointRefusedError:  # a seat that loses could fill the opponent's context: that would be no sample
            is_cut_off = True
        if not self._is_over and not is_cut_off:
            return self._add_new_messages()[-1:], 0.0, False, False, {}
        reward, info = await self.conclude()
        return "", reward, self._is_over, not self._is_over, info

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the score of a game, also of one that the run ended before it was over."""
        earned, reason = self._earned()
        reward = earned.get(self.seat, 0.0)
        return reward, {"success": reward >= 1.0, "seat": self.seat, "reason": reason}

    async def play(self, gateway: AgentGateway) -> None:
        """Play both seats; without roles the other seat uses a session that is not recorded."""
        keys = [gateway.role_keys.get(role, gateway.unrecorded_key) for role in ROLES]
        if not self.roles:
            keys[self.seat] = gateway.api_key
        clients = [OpenAIChatClient(gateway.base_url, gateway.model, key) for key in keys]

        async def ask(messages: Sequence[Message]) -> str:
            body = {"model": gateway.model, "messages": list(messages)}
            answer = await clients[self._game.player].complete(body, timeout_s=CALL_TIMEOUT_S)
            return str(answer["choices"][0]["message"]["content"] or "")

        try:
            if not self.roles:
                await self._open(ask)
            while not self._is_over and self._turns < self._max_turns * max(1, len(self.roles)):
                await self._move(await ask(self._add_new_messages()))
                if not self.roles:
                    await self._await_turn(ask)
        except EndpointRefusedError as error:
            has_begun = self._turns > 0
            is_limit = error.status == TURNS_USED_UP or "context_length" in error.said
            if not is_limit and not (has_begun and error.status in NOT_TAKEN):
                raise EnvError(f"TextArenaDuel-v0: {error}") from None
        except (InferenceError, TimeoutError) as error:
            raise EnvError(f"TextArenaDuel-v0: {error or 'no answer of the model in time'}") from None
        finally:
            for client in clients:
                await client.close()

    async def score(self) -> tuple[float | dict[str, float], dict[str, Any]]:
        if not self.roles:
            return await self.conclude()
        earned, reason = self._earned()
        return {role: earned.get(player, 0.0) for player, role in enumerate(ROLES)}, {"reason": reason}

    def _earned(self) -> tuple[Mapping[int, float], str]:
        """Return the reward of each seat, 0 if not named, and the reason."""
        if not self._is_over:
            return {}, "not over"
        return ({self._broken_by: -1.0}, self._broken) if self._broken else self._game.outcome()

    async def close(self) -> None:
        if self._opponent is not None:
            opponent, self._opponent = self._opponent, None
            await opponent.close()

    async def _deal(self) -> None:
        self._turns, self._is_over, self._conversations, self._broken = 0, False, ([], []), ""
        await call_in_thread(lambda: self._game.reset(self._game_seed))

    async def _open(self, opponent: Move) -> None:
        """Play to this seat's first turn. If the other seat loses before it, start anew: the game teaches nothing."""
        for _ in range(MAX_OPENINGS):
            await self._await_turn(opponent)
            if not self._is_over:
                return
            await self._deal()
        raise EnvError(
            f"TextArenaDuel-v0: the opponent ended {MAX_OPENINGS} games before the first turn of seat {self.seat}, as "
            "by moves that the game cannot read; begin with opponent=random, or with a model that knows the game"
        )

    async def _await_turn(self, opponent: Move) -> None:
        for _ in range(MAX_OPPONENT_TURNS):
            if self._is_over or self._game.player == self.seat:
                return
            await self._move(await opponent(self._add_new_messages()))
        raise EnvError(f"TextArenaDuel-v0: the opponent had {MAX_OPPONENT_TURNS} turns in a row")

    def _add_new_messages(self) -> list[Message]:
        """Add the game's new messages for the current player; return that player's whole conversation."""
        conversation = self._conversations[self._game.player]
        conversation.append({"role": "user", "content": self._game.new_messages()})
        return conversation

    async def _move(self, text: str) -> None:
        player = self._game.player
        is_trained = bool(self.roles) or player == self.seat
        self._turns += is_trained
        self._conversations[player].append({"role": "assistant", "content": text})
        try:
            self._is_over = await call_in_thread(lambda: self._game.move(without_thinking(text)))
        except GameRaisedError as error:
            if not is_trained:
                raise EnvError(f"TextArenaDuel-v0: the game raised for a move of the other seat: {error}") from None
            self._is_over, self._broken, self._broken_by = True, str(error), player
