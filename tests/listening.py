"""What listens in a process and all below it, and what it answers to somebody without a key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import psutil

HTTP = [
    *(("GET", path) for path in ("/", "/metrics", "/weight_info", "/api/version", "/v1/models")),
    *(("POST", path) for path in ("/pause", "/update_weights", "/inference/v1/generate", "/get_or_create_runtime_env")),
]
GRPC = [
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetSystemConfig",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/NumPendingTasks",
]
REFUSED = {"401", "403", "UNAUTHENTICATED"}
UNKNOWN = {"404", "405", "UNIMPLEMENTED"}
LOOPBACK = ("127.0.0.1", "::1")


def open_to_everybody(process: int) -> list[str]:
    """What answers somebody without a key, or listens beyond loopback, as lines for people."""
    root = psutil.Process(process)
    listening = [place for listener in [root, *root.children(recursive=True)] for place in _listening(listener)]
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda place: _answers(place[1], place[2]), listening)
        return [
            f"{name} at {address}:{port}: {sorted(said)}"
            for (name, address, port), said in zip(listening, answers, strict=True)
            if address not in LOOPBACK or (said and (not said & REFUSED or said - REFUSED - UNKNOWN))
        ]


def _listening(process: psutil.Process) -> list[tuple[str, str, int]]:
    try:
        sockets = [entry for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN]
        name = " ".join(process.cmdline())[:80]
    except psutil.NoSuchProcess:
        return []
    return [(name, entry.laddr.ip.removeprefix("::ffff:"), entry.laddr.port) for entry in sockets]


def _answers(address: str, port: int) -> set[str]:
    host = "127.0.0.1" if address in ("::", "0.0.0.0") else address
    answers = set()
    for method, path in HTTP:
        try:
            answers.add(str(httpx.request(method, f"http://{host}:{port}{path}", timeout=10).status_code))
        except httpx.HTTPError:
            break
    if answers:
        return answers
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for method in GRPC:
            try:
                channel.unary_unary(method)(b"", timeout=5)
                answers.add("OK")
            except grpc.RpcError as error:
                code = error.code().name  # type: ignore[attr-defined]
                if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    break
                answers.add(code)
    return answers


def key_holders(process: int) -> set[str]:
    """The keys that a process and all below it have in their environments."""
    root = psutil.Process(process)
    keys = set()
    for holder in [root, *root.children(recursive=True)]:
        try:
            environment = holder.environ()
        except psutil.NoSuchProcess:
            continue
        keys |= {value for name, value in environment.items() if name in ("ROLL_FLASH_SERVER_KEY", "RAY_AUTH_TOKEN")}
    return keys
