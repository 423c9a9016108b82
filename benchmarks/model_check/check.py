"""Runs the comparison on architectures of the list, and on models of the user's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.model_check.architectures import ALONE, SERVED, SHARED, write_model
from benchmarks.model_check.comparison import TOLERANCE, Comparison, compare_model
from benchmarks.model_check.publication import Published, publish_model
from roll_flash.models.prepare import resolve_model
from roll_flash.sandboxes.scratch import scratch_folder

FOLDER_TOLERANCE = 1e-3
"""For models of real size, whose float32 rounding alone is more than 1e-5; the same as in the test at a run's start."""


def compare(names: Sequence[str]) -> Iterator[Comparison]:
    """Yield the result of each architecture or model (a folder or name as in `model.path`; none: the whole list).

    Raises ModelError for an unknown name, or a model that transformers cannot load.
    """
    with _without_remarks():
        for name in names or [*SHARED, *ALONE]:
            with _folder_of(name) as folder:
                result = compare_model(folder, name, TOLERANCE if name in SHARED | ALONE else FOLDER_TOLERANCE)
            yield result


def publish(names: Sequence[str]) -> Iterator[Published]:
    """As `compare`, with a vLLM server; none: `SERVED`."""
    with _without_remarks():
        for name in names or SERVED:
            with _folder_of(name) as folder, scratch_folder("models") as scratch:
                result = publish_model(folder, name, scratch=scratch)
            yield result


@contextmanager
def _folder_of(name: str) -> Iterator[Path]:
    if name not in SHARED | ALONE:
        yield resolve_model(name)
        return
    with scratch_folder("models") as folder, one_thread():
        yield write_model(name, folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """For tiny models, which take several times as long where threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Without what transformers says about small sizes and slow kernels, and the learner about shared prefixes."""
    ours, verbosity = logging.getLogger("roll_flash.learner"), transformers_logging.get_verbosity()
    level = ours.level
    ours.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        ours.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
