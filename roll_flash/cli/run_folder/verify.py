"""`roll-flash verify`."""

from __future__ import annotations

from dataclasses import asdict

from roll_flash.cli.options import Json, RunName, show


def verify(run: RunName, as_json: Json = False) -> int:
    """Prove a run by its files: each episode trained at most once, no token too old, books that balance."""
    from roll_flash.run.run_dir import find_run
    from roll_flash.run.verify import verify_run

    findings = verify_run(find_run(run))
    lines = [f"{'ok  ' if each.ok else 'FAIL'}  {each.check:10} {each.detail}" for each in findings]
    show([asdict(each) for each in findings], "\n".join(lines), as_json=as_json)
    return 0 if all(each.ok for each in findings) else 1
