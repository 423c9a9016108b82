"""Where requests go: a state machine, so properties over random schedules."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roll_flash.inference.client.admission import Admission
from roll_flash.inference.client.router import SPILL_TOKENS, Router

SERVERS = ("a", "b", "c")


def test_a_new_episode_goes_to_the_server_with_the_least_outstanding_tokens() -> None:
    router = Router(SERVERS)
    assert [router.choose(tokens) for tokens in (100, 50, 10, 10)] == ["a", "b", "c", "c"]
    router.done("a", 100)
    assert router.choose(1) == "a"


def test_clients_that_begin_with_different_servers_do_not_all_load_the_first() -> None:
    assert [Router(SERVERS, first=client).choose(10) for client in (0, 1, 2, 3)] == ["a", "b", "c", "a"]


def test_of_equally_loaded_servers_the_nearest_is_asked_and_distance_never_outweighs_load() -> None:
    router = Router(SERVERS)
    router.set_distance("a", 0.0301)
    router.set_distance("b", 0.0012)
    router.set_distance("c", 0.0019)
    assert router.choose(10) == "b", "a millisecond is the smallest difference that counts: b is before c"
    assert [router.choose(10) for _ in range(2)] == ["c", "a"], "a loaded server waits for its turn, however near"
    router.done("b", 10)
    router.set_distance("b", 0.2)
    router.done("c", 10)
    assert router.choose(10) == "c", "b is far away now"


def test_a_pinned_session_goes_to_the_same_server_for_all_workers_however_far() -> None:
    near, far = Router(SERVERS, pinned=True), Router(SERVERS, pinned=True)
    far.set_distance("a", 0.05)
    for session in map(str, range(20)):
        assert near.choose(1, session=session) == far.choose(1, session=session)


def test_later_turns_go_where_the_prefix_is_cached() -> None:
    router = Router(SERVERS)
    home = router.choose(10, session="episode")
    assert home is not None
    router.done(home, 10)
    router.choose(500)
    assert router.choose(20, session="episode") == home
    assert router.spill_overs == 0


def test_an_episode_leaves_a_server_that_is_clearly_more_loaded_and_it_is_counted() -> None:
    router = Router(SERVERS)
    home = router.choose(SPILL_TOKENS + 1, session="episode")
    assert router.choose(1, session="episode") != home
    assert router.spill_overs == 1


def test_a_small_difference_at_a_high_load_is_no_reason_to_leave() -> None:
    router = Router(("a", "b"))
    assert router.choose(110 * SPILL_TOKENS, session="episode") == "a"
    assert router.choose(100 * SPILL_TOKENS) == "b"
    assert router.choose(1, session="episode") == "a"


def test_a_removed_server_gets_nothing_until_it_is_back() -> None:
    router = Router(("a", "b"))
    assert router.remove("a")
    assert not router.remove("a")
    assert {router.choose(1) for _ in range(5)} == {"b"}
    router.remove("b")
    assert router.choose(1) is None
    router.bring_back("a")
    assert router.choose(1, avoid="a") == "a"


def test_replicas_of_a_pinned_group_share_a_server_in_every_worker_and_groups_spread() -> None:
    workers = [Router(SERVERS, pinned=True, first=index) for index in range(3)]
    homes = {}
    for group in range(300):
        chosen = {router.choose(10**6, session=f"group-{group}") for router in workers for _ in range(4)}
        assert len(chosen) == 1
        homes[group] = chosen.pop()
    assert min(Counter(homes.values()).values()) > 50
    workers[0].remove("a")
    moved = {group: workers[0].choose(1, session=f"group-{group}") for group in range(300)}
    assert all(moved[group] == home for group, home in homes.items() if home != "a")
    assert set(moved.values()) == {"b", "c"}


def test_a_full_server_takes_nothing_and_a_request_larger_than_a_server_runs_alone() -> None:
    router = Router(("a", "b"), capacity_tokens={"a": 100, "b": 50})
    assert [router.choose(60), router.choose(40), router.choose(40)] == ["a", "b", "a"]
    assert router.choose(11) is None
    assert router.choose(10) == "b"
    router.done("b", 40)
    router.done("b", 10)
    assert router.choose(10_000) == "b"


def test_a_router_without_servers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one server"):
        Router(())


class RouterHistories(RuleBasedStateMachine):
    """Any history of requests, ends, removals and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = {"a": 500.0, "b": 1000.0}  # c has no limit
        self.router = Router(SERVERS, capacity_tokens=self.capacity)
        self.open: list[tuple[str, int]] = []
        self.out: set[str] = set()

    @rule(tokens=st.integers(1, 400), session=st.sampled_from([None, "x", "y"]), avoid=st.sampled_from([None, "a"]))
    def request(self, tokens: int, session: str | None, avoid: str | None) -> None:
        server = self.router.choose(tokens, session=session, avoid=avoid)
        if server is None:
            assert all(s in self.out or self.load(s) + tokens > self.capacity[s] for s in ("a", "b") if s != avoid)
            assert "c" in self.out
            return
        assert server not in self.out
        assert server != avoid or len(self.out) == len(SERVERS) - 1
        self.open.append((server, tokens))

    @precondition(lambda self: self.open)
    @rule()
    def end(self) -> None:
        self.router.done(*self.open.pop(0))

    @rule(server=st.sampled_from(SERVERS))
    def fail(self, server: str) -> None:
        self.router.remove(server)
        self.out.add(server)

    @rule(server=st.sampled_from(SERVERS))
    def come_back(self, server: str) -> None:
        self.router.bring_back(server)
        self.out.discard(server)

    def load(self, server: str) -> int:
        return sum(tokens for name, tokens in self.open if name == server)

    @invariant()
    def counts_balance_within_capacity(self) -> None:
        for server in SERVERS:
            assert self.router.outstanding_tokens(server) == self.load(server)
            assert self.load(server) <= self.capacity.get(server, float("inf"))
        assert self.router.healthy == len(SERVERS) - len(self.out)


TestRouterHistories = RouterHistories.TestCase


def test_what_is_over_the_limit_waits_in_order_and_the_wait_is_counted() -> None:
    async def play() -> tuple[list[int], Admission]:
        admission = Admission(Router(("a",), capacity_tokens={"a": 100}))
        entered: list[int] = []

        async def request(number: int, tokens: int) -> None:
            server = await admission.enter(tokens, None, None)
            entered.append(number)
            await asyncio.sleep(0.01)
            admission.leave(server, tokens)

        # The large one is third and is not overtaken by those behind it, which would fit beside the first.
        async with asyncio.timeout(10):
            await asyncio.gather(*(request(i, tokens) for i, tokens in enumerate((50, 20, 100, 10, 10))))
        return entered, admission

    entered, admission = asyncio.run(play())
    assert entered == [0, 1, 2, 3, 4]
    assert (admission.waiting, admission.waits) == (0, 3)
    assert admission.wait_s >= admission.max_wait_s > 0


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 120), st.integers(0, 3), st.booleans()), max_size=20),
)
def test_giving_up_at_any_moment_leaves_nothing_behind(requests: list[tuple[int, int, bool]]) -> None:
    async def play() -> tuple[int, int]:
        router = Router(("a",), capacity_tokens={"a": 100})
        admission = Admission(router)

        async def request(tokens: int) -> None:
            server = await admission.enter(tokens, None, None)
            try:
                await asyncio.sleep(0)
            finally:
                admission.leave(server, tokens)

        tasks = []
        for tokens, turns, gives_up in requests:
            tasks.append(asyncio.create_task(request(tokens)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if gives_up:
                tasks[len(tasks) // 2].cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
        return router.outstanding_tokens("a"), admission.waiting

    assert asyncio.run(play()) == (0, 0)
