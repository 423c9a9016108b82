"""Ask a Ray cluster whether a driver may join it: `python -m roll_flash.processes.ray.cluster_probe ADDRESS HOST:PORT`.

ADDRESS is the user's `ray.address`, HOST:PORT what it stands for. Prints one line of JSON: `problem` and `remedy`, both
empty if a driver here may join. It is a process of its own, because Ray's client may hang for 40 seconds or end its
process when something is wrong. SIGALRM ends this one when the cluster does not answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

from roll_flash.errors import first_line

ANSWER_S = 10.0
"""Time for all answers of the cluster, after the imports."""
REGISTERED_WITHIN_S = 3.0
"""Time for a raylet of this machine, which may have been started just now, to appear among the cluster's nodes."""
RAYLET_S = 5.0
"""Time for the answer of the raylet."""
TOKEN_PLACES = "RAY_AUTH_TOKEN, or the file ~/.ray/auth_token"


class CannotJoinError(Exception):
    """The arguments are what is wrong, and what to do."""


def main(address: str, where: str) -> None:
    import ray  # noqa: F401 - before the time begins

    signal.setitimer(signal.ITIMER_REAL, ANSWER_S)
    try:
        _enable_token_as_ray_does(address)
        client = _client(where)
        _check_that_a_token_is_required(where)
        _check_versions(client, where)
        _check_raylet(_node_here(client, where))
    except CannotJoinError as error:
        problem, remedy = error.args
    else:
        problem = remedy = ""
    print(json.dumps({"problem": problem, "remedy": remedy}), flush=True)


def _enable_token_as_ray_does(address: str) -> None:
    """`ray.init` uses a token without being told only with `auto`; here it must be judged by the same rule."""
    from ray._private.authentication import authentication_token_setup

    if address == "auto" and not os.environ.get("RAY_ADDRESS"):
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _client(where: str) -> Any:
    """Return a client of the cluster's control store. Raises CannotJoinError if it does not let us in."""
    from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RpcError

    sends_token, tokens = _sends_token(), AuthenticationTokenLoader.instance()
    if sends_token and not tokens.has_token(ignore_auth_mode=True):  # Ray would abort this process
        raise CannotJoinError("RAY_AUTH_MODE is token, but there is no token here", _copy_the_token())
    try:
        return GcsClient(address=where)
    except AuthenticationError:
        if sends_token:
            raise CannotJoinError(f"the token in {_token_source()} is not the cluster's", _copy_the_token()) from None
        if tokens.has_token(ignore_auth_mode=True):
            problem = f"the cluster requires a token, and the one in {_token_source()} is not sent"
            raise CannotJoinError(problem, "set RAY_AUTH_MODE=token") from None
        problem = "the cluster requires a token, and there is none here"
        raise CannotJoinError(problem, f"set RAY_AUTH_MODE=token; {_copy_the_token()}") from None
    except RpcError as error:
        problem = f"what listens there does not answer as the head of a Ray cluster ({error})"
        raise CannotJoinError(problem, other_ports()) from None


def _check_that_a_token_is_required(where: str) -> None:
    """A driver with a token refuses calls without one: nodes of a cluster without tokens could not call it, and each
    actor would be lost."""
    if _sends_token() and _lets_in_without_token(where):
        raise CannotJoinError(
            "the cluster has no token authentication, but this command has (RAY_AUTH_MODE=token)",
            "set RAY_AUTH_MODE=disabled here, or start all nodes of the cluster with RAY_AUTH_MODE=token",
        )


def _lets_in_without_token(where: str) -> bool:
    from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    mode = os.environ["RAY_AUTH_MODE"]
    try:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        Config.initialize("")  # reads the mode again
        GcsClient(address=where)
    except AuthenticationError:
        return False
    else:
        return True
    finally:
        os.environ["RAY_AUTH_MODE"] = mode
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def _check_versions(client: Any, where: str) -> None:
    from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
    from ray._private.utils import check_version_info, compute_version_info

    text = client.internal_kv_get(CLUSTER_METADATA_KEY, namespace=KV_NAMESPACE_CLUSTER, timeout=ANSWER_S)
    if text is None:
        return  # as Ray does
    theirs = json.loads(text)
    try:
        check_version_info(theirs, where)  # whether the last part of Python's version counts is a setting of Ray
    except RuntimeError:
        ray_here, python_here = compute_version_info()[:2]
        raise CannotJoinError(
            f"the cluster has Ray {theirs['ray_version']} and Python {theirs['python_version']}, but here are Ray "
            f"{ray_here} and Python {python_here}",
            "use the same virtual environment on all nodes",
        ) from None


def _node_here(client: Any, where: str) -> Any:
    """Return what the cluster says of its node on this machine. Raises CannotJoinError if there is none."""
    from ray._private.services import find_node_ids
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    ends = time.monotonic() + REGISTERED_WITHIN_S
    while here := find_node_ids():
        nodes = client.get_all_node_info(timeout=ANSWER_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
        if found := [node for key, node in nodes.items() if key.hex() in here]:
            return found[0]
        if time.monotonic() > ends:
            break
        time.sleep(0.5)
    other = " (its Ray belongs to another cluster)" if here else ""
    remedy = f"run `ray start --address={where}` here, with the cluster's token, or give this command on a node of it"
    raise CannotJoinError(f"this machine is not a node of the cluster{other}", remedy)


def _check_raylet(node: Any) -> None:
    """Raise CannotJoinError if the raylet of this machine does not answer: `ray.init` would hold Python's lock until it
    ends the process after 30 seconds."""
    from ray.exceptions import RayError

    address, port = node.node_manager_address, node.node_manager_port
    try:
        asyncio.run(_ask_raylet(address, port))
    except (RayError, TimeoutError) as error:
        raise CannotJoinError(
            f"the Ray of this machine (raylet at {address}:{port}) does not answer ({first_line(error)})",
            "run `ray stop` here, then `ray start` again",
        ) from None


async def _ask_raylet(address: str, port: int) -> None:
    from ray._raylet import RayletClient  # type: ignore[attr-defined]

    client = RayletClient(address, port)  # without this reference the answer would be lost
    async with asyncio.timeout(RAYLET_S + 1):
        await client.async_get_worker_pids(timeout_ms=int(RAYLET_S * 1000))


def other_ports() -> str:
    """Return what to do when something else than the head of a cluster listens at the address."""
    return (
        "give the port of `ray start --head --port=6379`, not that of Ray Client (10001) or the dashboard (8265); if "
        "it is right, start Ray on the head node again"
    )


def _copy_the_token() -> str:
    return f"put the token that `ray get-auth-token` prints on the head node into {TOKEN_PLACES}"


def _sends_token() -> bool:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return is_token_auth_enabled()


def _token_source() -> str:
    """Return where Ray found its token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"


if __name__ == "__main__":
    main(*sys.argv[1:])
