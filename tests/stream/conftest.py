"""The stores that the stream's tests run on: the in-process one, and two Ray shards that all tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from roll_flash.stream.store import MemoryStore, Store


@pytest.fixture(scope="session")
def ray_store(ray_local: None) -> Iterator[Store]:
    from roll_flash.stream.ray_store import RayStore

    store = asyncio.run(RayStore.start(2))
    yield store
    asyncio.run(store.close())


@pytest.fixture(params=["memory", pytest.param("ray", marks=pytest.mark.ray)])
def new_store(request: pytest.FixtureRequest) -> Callable[[], Store]:
    """A store that starts empty. That of Ray is emptied for the test; it is not to be closed."""
    if request.param == "memory":
        return MemoryStore
    store: Store = request.getfixturevalue("ray_store")
    asyncio.run(store.release(range(1000)))
    return lambda: store
