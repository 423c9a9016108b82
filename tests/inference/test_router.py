"""Where requests go: a state machine, so properties over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.inference.router import SPILL_TOKENS, UNHEALTHY_S, Router

SERVERS = ("a", "b", "c")


def test_a_new_episode_goes_to_the_server_with_the_least_outstanding_tokens() -> None:
    router = Router(SERVERS)
    chosen = [router.choose(tokens, session=None, now_s=0) for tokens in (100, 50, 10, 10)]
    assert chosen == ["a", "b", "c", "c"]
    router.done("a", 100)
    assert router.choose(1, session=None, now_s=0) == "a"


def test_later_turns_go_where_the_prefix_is_cached() -> None:
    router = Router(SERVERS)
    home = router.choose(10, session="episode", now_s=0)
    router.done(home, 10)
    router.choose(500, session=None, now_s=0)
    assert router.choose(20, session="episode", now_s=0) == home


def test_an_episode_leaves_a_server_that_is_overloaded() -> None:
    router = Router(SERVERS)
    home = router.choose(SPILL_TOKENS + 1, session="episode", now_s=0)
    assert router.choose(1, session="episode", now_s=0) != home


def test_a_server_that_failed_is_left_out_for_a_while() -> None:
    router = Router(("a", "b"))
    router.failed("a", now_s=10)
    assert {router.choose(1, session=None, now_s=10.1) for _ in range(5)} == {"b"}
    assert router.choose(1, session=None, now_s=10 + UNHEALTHY_S) == "a"


def test_with_all_servers_failed_the_one_that_failed_first_is_tried() -> None:
    router = Router(("a", "b"))
    router.failed("b", now_s=1)
    router.failed("a", now_s=2)
    assert router.choose(1, session=None, now_s=2) == "b"
    assert router.choose(1, session=None, now_s=2, avoid={"b"}) == "a"


def test_a_router_without_servers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one server"):
        Router(())


requests = st.lists(
    st.tuples(st.integers(1, 1000), st.sampled_from([None, "x", "y", "z"]), st.booleans(), st.booleans()), max_size=60
)


@given(requests=requests)
def test_outstanding_tokens_balance_and_unhealthy_servers_get_nothing(
    requests: list[tuple[int, str | None, bool, bool]],
) -> None:
    router = Router(SERVERS)
    open_requests: list[tuple[str, int]] = []
    for now_s, (tokens, session, fails, ends) in enumerate(requests):
        server = router.choose(tokens, session=session, now_s=now_s)
        healthy = [name for name in SERVERS if router.is_healthy(name, now_s)]
        assert server in healthy or not healthy
        open_requests.append((server, tokens))
        if fails:
            router.failed(server, now_s)
        if ends:
            router.done(*open_requests.pop(0))
    for name in SERVERS:
        assert router.outstanding_tokens(name) == sum(tokens for server, tokens in open_requests if server == name)
