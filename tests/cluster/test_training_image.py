"""The training image, built as `make training-image` does, and used without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = "roll-flash-training:cpu"
BUILD_LIMIT_S = 4500
RUN_LIMIT_S = 900
pytestmark = [pytest.mark.nightly, pytest.mark.docker, pytest.mark.timeout(6000)]


def images() -> set[str]:
    listed = subprocess.run(
        ["docker", "images", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(listed.stdout.splitlines())


@pytest.fixture(scope="module")
def built() -> Iterator[str]:
    """What the build printed. The image and its base are removed afterwards, if they were not there before."""
    before = images()
    command = [sys.executable, "docker/training_image.py", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        assert not [name for name in images() - before if name.startswith("<none>")], "stages of the build were left"
        yield done.stdout
    finally:
        new = [name.split()[0] for name in images() - before if name.startswith("roll-flash-training")]
        if new:
            subprocess.run(["docker", "rmi", "--force", *new], check=True, capture_output=True, timeout=300)


def in_image(*arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--rm", "--network=none", "--init", "--shm-size=2g", f"--volume={ROOT / 'tests'}:/work/tests:ro"]
    return subprocess.run(
        ["docker", "run", *options, *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )


def test_the_image_has_all_that_a_node_needs(built: str) -> None:
    done = in_image(IMAGE, "doctor", "--only", "python,packages,torch,vllm,ray,memory,/dev/shm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


def test_the_image_trains_as_an_ordinary_user_without_a_network(built: str) -> None:
    environment = ["envs.0.id=tests.counting:Counting-v0", "envs.0.max_turns=2"]
    config = ["/opt/roll-flash/configs/ci.yaml", "model.path=tiny", "inference.engine=transformers", "steps=1"]
    done = in_image(IMAGE, "train", *config, *environment, "name=image", "eval.tasks=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    assert "the books balance" in done.stdout


def test_the_image_starts_a_node_of_a_cluster(built: str) -> None:
    script = (
        "id -u; ray start --head --include-dashboard=false --num-cpus=1; "
        "for turn in $(seq 60); do ray status | grep ' node_' && exit; sleep 1; done; exit 1"
    )
    done = in_image(
        "--entrypoint=bash", "--env=RAY_AUTH_MODE=token", f"--env=RAY_AUTH_TOKEN={'t' * 32}", IMAGE, "-euc", script
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1000\n")


def test_an_image_that_is_there_is_not_built_again(built: str) -> None:
    command = [sys.executable, "docker/training_image.py", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"training image {IMAGE} is there\n")
