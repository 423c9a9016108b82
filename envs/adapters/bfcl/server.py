"""Runs bfcl-eval's tool classes and checker for one item in the sandbox; requests and answers are lines of JSON.

It is a separate program, so it imports nothing of ROLL Flash; the sandbox's Python may be a minimal one. The checker
waits in a process that is forked before the first call, so it starts from the package's state and not from the state
that the model's calls leave.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, TextIO

MAX_RESULT_CHARACTERS = 1 << 18


class _ContextVar:
    """Replacement for contextvars in `_pydecimal`, for a Python without it: there is one thread and one context."""

    def __init__(self, name: str) -> None:
        self._values: list[Any] = []

    def get(self) -> Any:
        if not self._values:
            raise LookupError
        return self._values[0]

    def set(self, value: Any) -> None:
        self._values[:] = [value]


def main(bundle: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # prints of the classes must not become answers
    _find_modules(bundle)
    import json

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=answers, flush=True)

    requests = iter(sys.stdin.readline, "")
    serve_item(json.loads(next(requests)), requests, answer, json.loads)


def serve_item(item: dict[str, Any], requests: Any, answer: Any, load: Any) -> None:
    """Serve one item. The first line is the item; `{"calls": [...]}` runs calls, `{"again": [...]}` also, without
    results, `{"check": ..., "ground_truth": ...}` ends the server."""
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

    for name in item["involved_classes"]:
        __import__(CLASS_FILE_PATH_MAPPING[name])
    checker = _fork_checker(item, answer, load)

    def run(calls: list[str]) -> list[str]:
        results, _ = execute_multi_turn_func_call(
            calls, item["initial_config"], item["involved_classes"], "model", item["id"], item["long_context"]
        )
        return [_bounded(result) for result in results]

    run([])
    answer({"ready": True})
    for line in requests:
        request = load(line)
        if "calls" in request:
            answer({"results": run(request["calls"])})
        elif "again" in request:
            for call in request["again"]:  # one by one, so that their results do not pile up
                run([call])
            answer({"ready": True})
        else:
            checker.write(line)
            checker.close()
            os.wait()
            return


def _fork_checker(item: dict[str, Any], answer: Any, load: Any) -> TextIO:
    """Fork a process that waits for one line, checks, and answers. Return the stream for that line."""
    reads, writes = os.pipe()
    if os.fork():
        os.close(reads)
        return os.fdopen(writes, "w")
    os.close(writes)
    line = os.fdopen(reads).readline()
    if line:
        answer(_check(item, load(line)))
    os._exit(0)


def _check(item: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    verdict = multi_turn_checker(request["check"], request["ground_truth"], item, item["id"], "model")
    return {key: _bounded(str(verdict.get(key, ""))) for key in ("error_type", "error_message")} | {
        "valid": verdict["valid"]
    }


def _bounded(result: str) -> str:
    if len(result) <= MAX_RESULT_CHARACTERS:
        return result
    half = MAX_RESULT_CHARACTERS // 2
    return f"{result[:half]}\n[... {len(result) - 2 * half} characters left out ...]\n{result[-half:]}"


def _find_modules(bundle: str) -> None:
    """Import the package's modules from the bundle, and modules that this Python lacks from its `lib`."""
    sys.path[:0] = [bundle]
    sys.path.append(bundle + "/lib")
    try:
        import contextvars  # noqa: F401
    except ImportError:
        module = ModuleType("contextvars")
        module.ContextVar = _ContextVar  # type: ignore[attr-defined]
        sys.modules["contextvars"] = module
    _import_when_used("mpmath")


def _import_when_used(name: str) -> None:
    """Import lazily: mpmath takes a second to compile, and only one function of one class needs it."""
    from importlib.util import LazyLoader, find_spec, module_from_spec

    spec = find_spec(name)
    if spec is None or spec.loader is None:
        return
    spec.loader = LazyLoader(spec.loader)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main(sys.argv[1])
