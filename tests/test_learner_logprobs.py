"""The learner's log-probabilities on the disk: of the last steps, by episode and sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roll_flash.run.learner_logprobs import KEPT_STEPS, read_logprobs, write_logprobs


def test_what_is_written_is_read_and_only_the_last_steps_are_kept(tmp_path: Path) -> None:
    for step in range(1, KEPT_STEPS + 3):
        values = {("g1-r0", 0): np.float32([-0.5, -step]), ("g1-r0", 1): np.float32([-2]), ("g1-r1", 0): np.float32([])}
        write_logprobs(tmp_path, step, values)
    assert read_logprobs(tmp_path, 2, "g1-r0") == {}
    assert read_logprobs(tmp_path, 3, "g1-r0") == {0: [-0.5, -3.0], 1: [-2.0]}
    assert read_logprobs(tmp_path, 3, "g1-r1") == {0: []}
    assert read_logprobs(tmp_path, 3, "g1-r2") == {}
    assert len(list((tmp_path / "learner_logprobs").iterdir())) == KEPT_STEPS


def test_a_step_that_is_made_again_replaces_what_it_gave_before(tmp_path: Path) -> None:
    for value in (-1, -2):
        write_logprobs(tmp_path, 1, {("g1-r0", 0): np.float32([value])})
    assert read_logprobs(tmp_path, 1, "g1-r0") == {0: [-2.0]}
