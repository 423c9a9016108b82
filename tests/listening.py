"""What listens in a process and all below it, and what it answers to somebody without a key."""

from __future__ import annotations

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
    """What answers somebody without a key, as lines for people; empty when all that listens asks for one.

    What speaks neither HTTP nor gRPC, as a store of torch.distributed, must listen on loopback only.
    """
    root = psutil.Process(process)
    found = []
    for listener in [root, *root.children(recursive=True)]:
        try:
            sockets = [entry for entry in listener.net_connections("inet") if entry.status == psutil.CONN_LISTEN]
            name = " ".join(listener.cmdline())[:80]
        except psutil.NoSuchProcess:
            continue
        for entry in sockets:
            answers = _answers(entry.laddr.ip, entry.laddr.port)
            if not answers and entry.laddr.ip in LOOPBACK:
                continue
            if not answers & REFUSED or answers - REFUSED - UNKNOWN:
                found.append(f"{name} at {entry.laddr.ip}:{entry.laddr.port}: {sorted(answers)}")
    return found


def _answers(address: str, port: int) -> set[str]:
    host = "127.0.0.1" if address in ("::", "0.0.0.0") else address
    answers = set()
    for method, path in HTTP:
        try:
            answers.add(str(httpx.request(method, f"http://{host}:{port}{path}", timeout=20).status_code))
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
                answers.add(error.code().name)  # type: ignore[attr-defined]
    return answers - {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


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
