"""`roll-flash verify`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

from roll_flash.cli.options import Json, RunName, Trust, flag, show, standard_output_for_json
from roll_flash.terminal import say


def verify(
    run: RunName,
    repeat: Annotated[bool, flag("--repeat", "Also train the steps before the newest checkpoint again.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Prove a run by its files: each episode trained at most once, no token too old, books that balance.

    --repeat starts a learner on this machine, which must come to the same weights: bit by bit on a CPU.
    """
    from roll_flash.config.user_code import find_modules_here
    from roll_flash.run.origin import require_own
    from roll_flash.run.run_dir import find_run
    from roll_flash.run.verify import verify_run

    folder = find_run(run)
    if repeat:
        require_own(folder, trusted=trust)
        find_modules_here()
    findings = verify_run(folder)
    if repeat and all(each.ok for each in findings):
        from roll_flash.replay.steps import repeat_steps

        with standard_output_for_json(as_json):
            findings.append(repeat_steps(folder, partial(say, error=True)))
    lines = [f"{'ok  ' if each.ok else 'FAIL'}  {each.check:10} {each.detail}" for each in findings]
    show([asdict(each) for each in findings], "\n".join(lines), as_json=as_json)
    return 0 if all(each.ok for each in findings) else 1
