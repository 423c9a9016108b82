"""Environments in which the policy plays several roles: what a worker makes of them, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from test_agent_episodes import ask, client_of, play

from roll_flash.config.tree import RolloutConfig
from roll_flash.envs import Env, register_env
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.hosting.environments import check_environments
from roll_flash.errors import ConfigError
from roll_flash.rollout.worker import Outcome
from roll_flash.scheduling.tasks import make_task
from roll_flash.stream import finished_episode
from roll_flash.system.start_checks import NO_ROLES_IN_GIGPO
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Trajectory
from tests.inference.stand_in_server import StandInServer, well

ROLES = ("buyer", "seller")


class Bargain(Env):
    """Each of the two asks as often as `asks` says, with its own key; each is paid what `pays` says."""

    runs_own_loop = True
    roles = ROLES

    def __init__(self, asks: tuple[int, int] = (2, 1), pays: Any = None, loop: bool = True) -> None:
        self._asks, self.runs_own_loop = asks, loop
        self._pays = {"buyer": 0.25, "seller": -4.0} if pays is None else pays

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "", {}

    async def play(self, gateway: AgentGateway) -> None:
        assert gateway.api_key == gateway.role_keys["buyer"]
        async with client_of(gateway) as client:
            for role, count in zip(ROLES, self._asks, strict=True):
                messages: list[Any] = [{"role": "user", "content": f"You are the {role}."}]
                for _ in range(count):
                    player = client.with_options(api_key=gateway.role_keys[role])
                    messages.append({"role": "assistant", "content": await ask(player, gateway, messages)})
                    messages.append({"role": "user", "content": "and then?"})
        self._answers = len(gateway.answers())

    async def score(self) -> tuple[Any, Mapping[str, Any]]:
        return self._pays, {"answers": self._answers}


register_env("Bargain-v0", Bargain)


def bargain(max_turns: int = 8, **kwargs: Any) -> Outcome:
    task = make_task("Bargain-v0", 0, kwargs)
    (outcome,) = play(EpisodeSpec("b", "g", 0, task, SamplingParams(max_new_tokens=6), max_turns))
    return outcome


def test_each_role_is_a_sample_with_its_own_turns_and_reward() -> None:
    outcome = bargain()
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.episode_id == "b"
    assert [(sample.role, len(sample.turns)) for sample in outcome.samples] == [("buyer", 2), ("seller", 1)]
    assert [sample.messages[0]["content"] for sample in outcome.samples] == [f"You are the {role}." for role in ROLES]
    assert [[turn.reward for turn in sample.turns] for sample in outcome.samples] == [[0.0, 0.25], [-4.0]]
    assert (outcome.reward, outcome.end, outcome.policy_tokens) == (0.25, "terminated", 18)
    assert outcome.info["roles"] == {"buyer": 0.25, "seller": -4.0}
    assert (outcome.info["answers"], outcome.info["gateway"]["calls"]) == (3, 3)
    assert finished_episode(outcome).role_rewards == {"buyer": 0.25, "seller": -4.0}


def test_no_two_calls_of_an_episode_draw_the_same_random_numbers() -> None:
    """Two seats of a game with the same seed would make the same moves."""
    seeds: list[int] = []

    async def noting(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seeds.append(request["sampling_params"]["seed"])
        await well(server, request, writer)

    task = make_task("Bargain-v0", 0, {"asks": (3, 3)})
    play(EpisodeSpec("b", "g", 0, task, SamplingParams(max_new_tokens=6, seed=0), 8), handler=noting)
    assert len(seeds) == len(set(seeds)) == 6


def test_a_role_that_never_spoke_has_no_sample() -> None:
    outcome = bargain(asks=(0, 2))
    assert isinstance(outcome, Trajectory), outcome
    assert [sample.role for sample in outcome.samples] == ["seller"]
    assert (outcome.episode_id, outcome.reward, outcome.info["roles"]["buyer"]) == ("b", -4.0, 0.25)


def test_the_limit_of_turns_is_that_of_each_role() -> None:
    outcome = bargain(asks=(2, 2), max_turns=2)
    assert isinstance(outcome, Trajectory), outcome
    outcome = bargain(asks=(2, 3), max_turns=2)
    assert isinstance(outcome, EpisodeFailure), outcome
    assert (outcome.cause, outcome.turn) == ("env_error", 4)


def test_an_episode_in_which_nobody_spoke_is_a_failure() -> None:
    outcome = bargain(asks=(0, 0))
    assert isinstance(outcome, EpisodeFailure)
    assert (outcome.cause, "asked 0 times" in outcome.message) == ("env_error", True)


@pytest.mark.parametrize("pays", [1.0, {"buyer": 1.0}, {"buyer": 1.0, "seller": 0.0, "judge": 0.0}])
def test_a_reward_that_does_not_name_each_role_is_a_failure(pays: Any) -> None:
    outcome = bargain(pays=pays)
    assert isinstance(outcome, EpisodeFailure)
    assert (outcome.cause, "a reward for each of the roles" in outcome.message) == ("bad_reward", True)


def test_a_reward_of_a_role_that_is_no_number_is_a_failure() -> None:
    outcome = bargain(pays={"buyer": 1.0, "seller": float("inf")})
    assert isinstance(outcome, EpisodeFailure)
    assert outcome.cause == "bad_reward"


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"roles": "buyer"}, r"roles is a tuple of names; write roles = \('buyer',\)"),
        ({"policies": "user"}, r"policies is a tuple of names; write policies = \('user',\)"),
        ({"score": None}, "it must define `async def score`"),
        ({"play": None}, "it must define `async def play`"),
    ],
)
def test_what_no_episode_could_play_is_refused_at_the_start(members: dict[str, Any], says: str) -> None:
    """Of a name without a comma each letter was a role, and what is missing was found after the servers had started."""
    register_env("Unplayable-v0", type("Unplayable", (Bargain,), members))
    with pytest.raises(ConfigError, match=says):
        check_environments([make_task("Unplayable-v0", 0, {})], RolloutConfig())


def test_a_score_that_is_no_pair_is_told_what_is_wanted() -> None:
    class OnlyReward(Bargain):
        async def score(self) -> Any:
            return self._pays

    register_env("OnlyReward-v0", OnlyReward)
    task = make_task("OnlyReward-v0", 0, {})
    (outcome,) = play(EpisodeSpec("o", "g", 0, task, SamplingParams(max_new_tokens=6), 8))
    assert isinstance(outcome, EpisodeFailure)
    assert "score returned dict, not (reward, info)" in outcome.message


def test_roles_that_would_be_ignored_or_cannot_be_compared_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="roles need runs_own_loop"):
        check_environments([make_task("Bargain-v0", 0, {"loop": False})], RolloutConfig())
    with pytest.raises(ConfigError, match="compares the turns of one role"):
        check_environments([make_task("Bargain-v0", 0, {})], RolloutConfig(), NO_ROLES_IN_GIGPO)
    check_environments([make_task("Bargain-v0", 0, {})], RolloutConfig())
