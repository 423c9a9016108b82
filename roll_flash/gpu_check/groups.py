"""The list of all checks, in the order in which they run. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll_flash.errors import ConfigError
from roll_flash.gpu_check.check import Check, Group
from roll_flash.gpu_check.settings import Settings

HERE = "roll_flash.gpu_check"
LENGTHS: tuple[int, ...] = (128, 1024, 4096, 16384)
REHEARSED_LENGTHS: tuple[int, ...] = (128, 512)
NO_GPU = "there is no GPU here"


def all_groups(settings: Settings) -> list[Group]:
    return [
        _machine(),
        _kernels(settings),
        _servers(settings),
        _direct_transfer(settings, "ipc", 1),
        _direct_transfer(settings, "nccl", 2),
        _two_ranks(settings),
        _two_servers(settings),
        _tensor_parallel(settings),
        _run(),
    ]


def groups_named(words: str, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with one of the words in their name, and the first, which makes the model of all others.

    `words` are separated by commas. Raises ConfigError if one is in no name.
    """
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    for word in wanted:
        if not any(word in group.name for group in groups):
            raise ConfigError(f"--only {word}: is in no name; groups are {'; '.join(group.name for group in groups)}")
    first, *others = groups
    return [first, *(group for group in others if any(word in group.name for word in wanted))]


def _check(name: str, why: str, function: str, deadline_s: float, **arguments: Any) -> Check:
    return Check(name, why, f"{HERE}.{function}", deadline_s, arguments)


def _machine() -> Group:
    return Group(
        "machine",
        (
            _check("doctor", "Packages, compiler and memory are what runs need.", "machine:doctor", 60),
            _check("driver", "torch sees the GPUs that the driver shows.", "machine:driver", 60),
            _check("model", "The model of the other checks is there.", "machine:model", 600),
            _check("plan", "Ranks and servers of this config have a place.", "machine:plan", 60),
            _check("recipes", "Which recipes have a place on this machine.", "machine:recipes", 60),
        ),
    )


def _kernels(settings: Settings) -> Group:
    small = {"size": 512, "megabytes": 16} if settings.rehearsal else {}
    lengths = REHEARSED_LENGTHS if settings.rehearsal else LENGTHS
    flex = [_flex_on_cpu(tokens) for tokens in lengths] if settings.rehearsal else []
    attention = "Packed rows get outputs and gradients of a dense mask, and no token sees what it must not."
    return Group(
        "kernels",
        (
            _check("speed", "What steps and publications are compared with.", "machine:speed", 120, **small),
            *(
                _check(f"attention of {tokens} tokens", attention, "attention:attention", 180, tokens=tokens)
                for tokens in lengths
            ),
            *flex,
            _check(
                "log-probabilities of the head",
                "In bfloat16 they and their gradients are exact, also for tokens of p = 0.999.",
                "logprobs:head",
                120,
            ),
            _check(
                "log-probabilities of the model",
                "The model in bfloat16 gives nearly those of float32.",
                "logprobs:whole_model",
                300,
            ),
        ),
        gpus=1,
    )


def _flex_on_cpu(tokens: int) -> Check:
    why = "The mask of GPUs hides the same tokens (outputs only: FlexAttention has no gradients on a CPU)."
    return _check(f"FlexAttention of {tokens} tokens", why, "attention:flex_on_cpu", 120, tokens=tokens)


START = "As in a training run: the model is tried, then servers and learner start where the plan puts them."
PUBLICATION = "Servers answer with changed weights after an update with requests in flight, which lose no token."
PLACED = "Processes are on the GPUs of the plan."
PARITY = "Servers and learner give 1,000 tokens the same log-probabilities with the same weights."
STEP = "Speed and memory of training at the length of the config."
KILLED = "A server that is killed in the middle of an update comes back with the new weights; no request is lost."
ON_CPU = (
    "inference.weight_transfer=shm",
    "learner.device=cpu",
    "learner.ranks=1",
    "learner.rank_resources=null",
    "learner.compile=false",
    "learner.activation_offload=false",
)
"""Leaves all GPUs to servers."""


def _start(name: str, overrides: Sequence[str], *, serves: bool = True, must_fit: bool = False) -> Check:
    """`must_fit`: the config itself; the others have fewer or other parts, for which a large model may have no room."""
    arguments = {"overrides": list(overrides), "serves": serves, "must_fit": must_fit}
    return _check(f"{name}: start", START, "servers:models", 900, **arguments)


def _publication(name: str, deadline_s: float) -> Check:
    return _check(f"{name}: publication", PUBLICATION, "servers:publication", deadline_s)


def _servers(settings: Settings) -> Group:
    name = "servers, weights by shm"
    return Group(
        name,
        (
            *([] if settings.rehearsal else [_check(f"{name}: places", PLACED, "servers:placed", 60)]),
            _check(f"{name}: parity", PARITY, "servers:parity", 300),
            _publication(name, 400),
            _check(f"{name}: a server is killed", KILLED, "servers:kill", 700),
            _check(
                "save and load",
                "A loaded checkpoint has the same weights and optimizer, and leads to the same next step.",
                "training:save_and_load",
                400,
            ),
            _check("step", STEP, "training:step", 400),
        ),
        opens=_start(name, ["inference.weight_transfer=shm"], must_fit=True),
    )


def _direct_transfer(settings: Settings, transfer: str, gpus: int) -> Group:
    name = f"weights by {transfer}"
    overrides = [f"inference.weight_transfer={transfer}"]
    if settings.rehearsal:
        reason = f"{NO_GPU}, and {transfer} moves weights between GPUs"
    elif settings.gpus < gpus:
        reason = f"{transfer} needs {gpus} GPUs, one for the rank and one for the server; there is {settings.gpus}"
    else:
        reason = ""
    return Group(
        name,
        (
            _publication(name, 400),
            *([_check(f"{name}: a server is killed", KILLED, "servers:kill", 700)] if transfer == "nccl" else []),
        ),
        opens=_start(name, overrides),
        not_possible=reason,
        gpus=1 if gpus == 1 else None,
    )


def _on_two_gpus(settings: Settings, name: str, overrides: Sequence[str], *checks: Check, serves: bool = True) -> Group:
    reason = f"needs 2 GPUs; there is {settings.gpus}" if settings.gpus == 1 else ""
    if settings.rehearsal:
        reason = f"{NO_GPU}; the other checks of a rehearsal have two ranks and two servers"
    return Group(
        name,
        (_check(f"{name}: places", PLACED, "servers:placed", 60), *checks),
        opens=_start(name, overrides, serves=serves),
        not_possible=reason,
    )


def _two_ranks(settings: Settings) -> Group:
    name = "two ranks"
    step = _check(f"{name}: step", STEP, "training:step", 400)
    return _on_two_gpus(settings, name, ["learner.ranks=2"], step, serves=False)


def _two_servers(settings: Settings) -> Group:
    name = "two servers"
    overrides = ["inference.servers=2", "inference.tensor_parallel_size=1", *ON_CPU]
    return _on_two_gpus(settings, name, overrides, _publication(name, 600))


def _tensor_parallel(settings: Settings) -> Group:
    name = "a server on two GPUs"
    overrides = ["inference.tensor_parallel_size=2", "inference.servers=1", *ON_CPU]
    parity = _check(f"{name}: parity", PARITY, "servers:parity", 400)
    return _on_two_gpus(settings, name, overrides, parity, _publication(name, 600))


def _run() -> Group:
    return Group(
        "run",
        (
            _check("run", "A small run of workers, servers and learner ends in order.", "training:run", 900),
            _check("run, resumed", "It goes on where it ended.", "training:resume", 900),
        ),
    )
