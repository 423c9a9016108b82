"""`roll-flash export`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roll_flash.cli.options import Json, Text, argument, flag, option, show
from roll_flash.errors import ConfigError

if TYPE_CHECKING:
    from roll_flash.run.run_dir import Checkpoint


def export(
    run: Annotated[str, argument("RUN[@step]", "A run's name or folder; without @step its newest checkpoint.")],
    folder: Annotated[Text, argument("DIR", "A folder that does not exist or is empty.")] = None,
    adapter: Annotated[bool, flag("--adapter", "Only the LoRA adapter, as a folder of PEFT.")] = False,
    push: Annotated[Text, option("ORG/NAME", "Upload it to a hub, private, with the token in HF_TOKEN.")] = None,
    public: Annotated[bool, flag("--public", "Let everybody read what --push uploads.")] = False,
    as_json: Json = False,
) -> int:
    """Write a checkpoint as a Hugging Face model folder, to DIR or to a hub."""
    if folder is None and push is None:
        raise ConfigError("export needs a DIR to write to, or --push ORG/NAME")
    if public and push is None:
        raise ConfigError("--public is for --push ORG/NAME")
    with ExitStack() as stack:
        checkpoint, written = _write(run, folder, adapter, stack)
        what = f"{'adapter' if adapter else 'model'} of step {checkpoint.step}"
        address = _upload(written, push, what, public) if push else None
    value = {"folder": folder and str(written), "step": checkpoint.step, "checkpoint": str(checkpoint.folder)}
    show(value | ({"address": address} if push else {}), f"{address or written}: {what}", as_json=as_json)
    return 0


def _write(run: str, folder: str | None, adapter: bool, stack: ExitStack) -> tuple[Checkpoint, Path]:
    """Return the checkpoint and the folder with what is exported: its own, if it is only to be uploaded."""
    from roll_flash.run.run_dir import export_checkpoint, find_exported

    if adapter:
        from roll_flash.learner.ranks.checkpoint import export_adapter
        from roll_flash.sandboxes.scratch import scratch_folder

        return export_adapter(run, folder or str(stack.enter_context(scratch_folder("export")) / "adapter"))
    if folder is not None:
        return export_checkpoint(run, folder)
    checkpoint = find_exported(run)
    return checkpoint, checkpoint.hf


def _upload(folder: Path, name: str, what: str, public: bool) -> str:
    from roll_flash.models.hub import upload_model

    return upload_model(folder, name, public=public, message=f"{what}, trained with ROLL Flash")
