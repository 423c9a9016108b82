"""The launchers of configs/cluster: what they call, and that all keys in them are known."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_flash.config.tree import load_config
from tests.cluster.machines import machines, why_not

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "configs/cluster"
FOUR_NODES = LAUNCHERS / "four_nodes.yaml"
IN_IMAGE = "/opt/roll-flash/configs/cluster/"
"""Where the training image has the launchers."""
RECORD = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >>"$CALLS"
"""
"""Stand-in for a program: writes down how it was called."""
LIMIT_S = 60
GONE_S = 10
"""Time in seconds in which the kernel takes the last process of an ended job away."""
RAY_LIMIT_S = 300
"""Ray's commands import much."""


def stand_in(folder: Path, name: str, then: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(RECORD + then)
    (folder / name).chmod(0o755)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    calls = tmp_path / "calls"
    calls.touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), **more}


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def overrides(command: str) -> list[str]:
    """The `key=value` arguments of a `roll-flash train` in a shell command."""
    words = shlex.split(command)
    return [word for word in words if re.fullmatch(r"[a-z_.]+=[^$]*", word)]


@pytest.mark.parametrize("name", ["submit.sh", "train.sbatch", "train_when_ready.sh"])
def test_the_scripts_are_valid_and_can_be_run(name: str) -> None:
    script = LAUNCHERS / name
    assert os.access(script, os.X_OK)
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_config_of_four_nodes_binds_each_kind_to_its_nodes() -> None:
    config = load_config(FOUR_NODES)
    assert config.ray.address == "auto"
    assert "envs" in config.rollout.worker_resources
    assert "servers" in (config.inference.server_resources or {})
    assert "ranks" in (config.learner.rank_resources or {})


# --- ray job submit


def submit(tmp_path: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    stand_in(tmp_path / "bin", "ray")
    return subprocess.run(
        [str(LAUNCHERS / "submit.sh"), *arguments],
        env=environment(tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_a_run_is_submitted_with_its_code_and_time_for_a_checkpoint(tmp_path: Path) -> None:
    """`ray` is a stand-in."""
    settings = {"RAY_API_SERVER_ADDRESS": "http://head:8265", "RAY_AUTH_TOKEN": "t" * 32, "WORKING_DIR": "mine"}
    done = submit(tmp_path, "mine.yaml", "name=mine", STOP_TIMEOUT_S="90", **settings)
    assert done.returncode == 0, done.stderr
    (call,) = calls(tmp_path)
    options, _, command = call.partition(" -- ")
    assert command == "roll-flash train mine.yaml ray.address=auto name=mine"
    assert options.startswith("ray job submit --runtime-env-json ")
    assert json.loads(options[options.index("{") : options.rindex("}") + 1]) == {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"}
    }
    assert options.endswith("--working-dir mine")
    known = ray_options("job", "submit")
    assert {word for word in options.split() if word.startswith("--")} <= known


def test_submitting_without_the_token_is_refused(tmp_path: Path) -> None:
    done = submit(tmp_path, "mine.yaml", RAY_API_SERVER_ADDRESS="http://head:8265")
    assert done.returncode != 0
    assert "RAY_AUTH_TOKEN: set it to the token of the cluster" in done.stderr
    assert calls(tmp_path) == []


@cache
def ray_options(*command: str) -> set[str]:
    """The options that the real `ray` knows."""
    ray = Path(sys.executable).with_name("ray")
    done = subprocess.run(
        [str(ray), *command, "--help"], capture_output=True, text=True, timeout=RAY_LIMIT_S, check=True
    )
    return set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", done.stdout, re.MULTILINE))


# --- Slurm


SRUN = """
case "$*" in
*"ray start"*) trap 'exit 143' TERM; while true; do sleep 0.1; done ;;
esac
"""
"""A step of Ray lasts until it is stopped."""
RAY_STATUS = """
[ "$1" != status ] || printf 'Active:\\n 1 node_a\\n 1 node_b\\n 1 node_c\\n 1 node_d\\nPending:\\n'
"""


def slurm(tmp_path: Path, train: str, **settings: str) -> subprocess.Popen[str]:
    """Start the batch script with stand-ins for Slurm's commands, Ray and the run; `train` is what the run does."""
    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    (project / "configs/cluster").symlink_to(LAUNCHERS)
    stand_in(tmp_path / "bin", "srun", SRUN)
    stand_in(tmp_path / "bin", "scontrol", "printf '%s\\n' n1 n2 n3 n4")
    stand_in(project / ".venv/bin", "ray", RAY_STATUS)
    stand_in(project / ".venv/bin", "roll-flash", train)
    job = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_SUBMIT_DIR": str(project), "HEAD_ADDRESS": "10.0.0.1"}
    return subprocess.Popen(
        ["bash", str(LAUNCHERS / "train.sbatch"), "mine.yaml", "name=mine"],
        env=environment(tmp_path, **job, **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and output; nothing of the job may be left."""
    output, _ = process.communicate(timeout=LIMIT_S)
    deadline = time.monotonic() + GONE_S
    while _exists(process.pid):
        assert time.monotonic() < deadline, f"processes of the job are left:\n{output}"
        time.sleep(0.05)
    return process.returncode, output


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_slurm_job_starts_ray_on_each_node_trains_and_stops_ray(tmp_path: Path) -> None:
    """`srun`, `scontrol`, `ray` and `roll-flash` are stand-ins."""
    until_all_have_begun = 'while [ "$(grep -c "ray start" "$CALLS")" -lt 4 ]; do sleep 0.05; done\n'
    status, output = ended(slurm(tmp_path, until_all_have_begun + 'echo "token ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE"'))
    assert status == 0, output
    assert "token 64 token" in output
    steps = [call for call in calls(tmp_path) if call.startswith("srun") and "ray start" in call]
    wanted = [("n1", "head"), ("n2", "envs"), ("n3", "servers"), ("n4", "ranks")]
    assert sorted(steps) == sorted(
        f"srun --overlap --nodes=1 --ntasks=1 --nodelist={node} ray start --block --disable-usage-stats "
        f'--resources={{"{role}": 8}} '
        + (
            "--head --port=6379 --node-ip-address=10.0.0.1 --include-dashboard=false"
            if role == "head"
            else "--address=10.0.0.1:6379"
        )
        for node, role in wanted
    )
    given = {word.partition("=")[0] for step in steps for word in step.partition("ray start")[2].split()}
    assert {word for word in given if word.startswith("--")} <= ray_options("start")
    assert [call for call in calls(tmp_path) if "ray start" not in call][-2:] == [
        "roll-flash train mine.yaml ray.address=auto name=mine",
        "srun --overlap --nodes=4 --ntasks-per-node=1 ray stop --force",
    ]


def test_a_slurm_job_whose_run_fails_stops_ray_and_fails_too(tmp_path: Path) -> None:
    status, output = ended(slurm(tmp_path, "exit 3"))
    assert status == 3, output
    assert any("ray stop --force" in call for call in calls(tmp_path))


def test_a_slurm_job_near_its_end_lets_the_run_write_its_checkpoint(tmp_path: Path) -> None:
    train = "trap 'sleep 1; echo checkpoint; exit 130' TERM; echo trains; while true; do sleep 0.1; done"
    process = slurm(tmp_path, train)
    assert process.stdout is not None
    assert process.stdout.readline() == "trains\n"
    os.kill(process.pid, signal.SIGTERM)  # to the batch shell alone, as `--signal=B:` asks
    status, output = ended(process)
    assert (status, "checkpoint" in output) == (130, True), output
    assert any("ray stop --force" in call for call in calls(tmp_path))


def test_a_slurm_job_with_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    status, output = ended(slurm(tmp_path, "", ROLES="head envs"))
    assert (status, output) == (2, "ROLES names 2 nodes (head envs), and the job has 4\n")


def test_a_run_does_not_wait_for_ever_for_nodes(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "ray", RAY_STATUS)
    began = time.monotonic()
    done = subprocess.run(
        [str(LAUNCHERS / "train_when_ready.sh"), "5", "mine.yaml"],
        env=environment(tmp_path, START_TIMEOUT_S="3"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "of 5 nodes only 4 joined Ray within 3 s; their logs say why\n",
    )
    assert time.monotonic() - began < 30


@pytest.mark.ray
def test_the_driver_waits_until_the_nodes_of_a_real_cluster_are_there() -> None:
    if reason := why_not():
        pytest.skip(reason)
    parts = {
        "model.path": "tiny",
        "inference.engine": "transformers",
        "rollout.worker_resources": "{CPU: 0.1, envs: 1}",
        "inference.server_resources": "{CPU: 1, servers: 1}",
        "learner.rank_resources": "{CPU: 1, ranks: 1}",
    }
    command = ["bash", str(LAUNCHERS / "train_when_ready.sh"), "2", "configs/ci.yaml", "--dry-run"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with machines("head", "envs") as (head, envs):
        head.join_ray(cpus=2, resources='{"servers": 1, "ranks": 1}')
        waiting = head.start(*command, *(f"{key}={value}" for key, value in parts.items()), PATH=path)
        time.sleep(8)
        assert waiting.poll() is None
        envs.join_ray(head, resources='{"envs": 1}')
        output, _ = waiting.communicate(timeout=RAY_LIMIT_S)
    assert waiting.returncode == 0, output
    assert re.search(r"worker 0 +envs \(10\.77\.0\.2\)", output)
    assert re.search(r"server 0 +head \(10\.77\.0\.1\)", output)


# --- Kubernetes


@pytest.fixture(scope="module")
def ray_job() -> dict[str, Any]:
    return dict(yaml.safe_load((LAUNCHERS / "kuberay.yml").read_text()))


def pods(ray_job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Head and worker groups by name."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    return {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}


FIELDS = {
    "job": {"entrypoint", "runtimeEnvYAML", "shutdownAfterJobFinishes", "backoffLimit", "submitterConfig"}
    | {"rayClusterSpec"},
    "cluster": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "head": {"rayStartParams", "template"},
    "group": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "pod": {"securityContext", "containers", "volumes"},
    "container": {"name", "image", "env", "args", "ports", "resources", "volumeMounts", "lifecycle", "securityContext"},
}
"""Fields of KubeRay's RayJob (ray.io/v1) and of Kubernetes' pods that the manifest uses; others are misspelt."""


def test_the_kubernetes_manifest_has_the_fields_of_a_ray_job(ray_job: dict[str, Any]) -> None:
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(ray_job["spec"]) == FIELDS["job"]
    assert set(ray_job["spec"]["rayClusterSpec"]) == FIELDS["cluster"]
    for name, group in pods(ray_job).items():
        assert set(group) == FIELDS["head" if name == "head" else "group"], name
        assert group.get("minReplicas", 1) <= group.get("replicas", 1) <= group.get("maxReplicas", 1)
        pod = group["template"]["spec"]
        assert set(pod) == FIELDS["pod"], name
        for container in pod["containers"]:
            assert {"name", "image", "resources"} <= set(container) <= FIELDS["container"], container["name"]


def test_each_kubernetes_pod_has_rays_container_first_with_bounded_resources(ray_job: dict[str, Any]) -> None:
    images = set()
    for name, group in pods(ray_job).items():
        pod = group["template"]["spec"]
        first, *others = pod["containers"]
        assert first["name"] == ("ray-head" if name == "head" else "ray-worker")
        assert not others or [each["name"] for each in others] == ["engine"]
        images.add(first["image"])
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
    assert len(images) == 1, "Ray's nodes must have the same packages"


def test_the_names_of_kubernetes_nodes_are_those_that_the_config_asks_for(ray_job: dict[str, Any]) -> None:
    places: dict[str, float] = {}
    for group in pods(ray_job).values():
        params = group["rayStartParams"]
        assert all(isinstance(value, str) for value in params.values()), "KubeRay takes texts only"
        assert {f"--{name}" for name in params} <= ray_options("start")
        (unquoted,) = shlex.split(params.get("resources", "'{}'"))  # they become a shell command
        for name, amount in json.loads(unquoted).items():
            places[name] = places.get(name, 0) + amount * group["replicas"]
    gpus = sum(
        group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)
        for group in pods(ray_job).values()
    )
    settings = overrides(ray_job["spec"]["entrypoint"])
    config = load_config(FOUR_NODES, settings)
    wanted = {"GPU": 0.0, "CPU": 0.0}
    for number, resources in (
        (config.rollout.workers, config.rollout.worker_resources),
        (config.inference.servers, config.inference.server_resources or {}),
        (config.learner.ranks, config.learner.rank_resources or {}),
    ):
        for name, amount in resources.items():
            wanted[name] = wanted.get(name, 0.0) + number * amount
    del wanted["CPU"]
    assert wanted == {**places, "GPU": gpus}
    assert settings == [word for word in shlex.split(ray_job["spec"]["entrypoint"]) if "=" in word]
    assert IN_IMAGE + FOUR_NODES.name in ray_job["spec"]["entrypoint"]


def test_ray_on_kubernetes_asks_for_a_token_and_has_the_pinned_version(ray_job: dict[str, Any]) -> None:
    cluster = ray_job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}  # KubeRay sets RAY_AUTH_MODE and RAY_AUTH_TOKEN from a Secret
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "requirements/cpu.txt").read_text().splitlines()
    assert yaml.safe_load(ray_job["spec"]["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}


# --- docker compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((LAUNCHERS / "compose.yml").read_text()))


def ray_start_options(service: dict[str, Any]) -> list[str]:
    words = service["entrypoint"] + service["command"]
    if words[0] == "bash":
        words = shlex.split(words[-1].splitlines()[0])
    assert words[:2] == ["ray", "start"]
    return [word for word in words[2:] if word.startswith("-")]


def test_the_compose_services_use_options_that_ray_knows(compose: dict[str, Any]) -> None:
    known = ray_options("start")
    for name, service in compose["services"].items():
        given = {option.partition("=")[0] for option in ray_start_options(service)}
        assert given <= known, name
        assert service["image"] == "${IMAGE:-roll-flash-training:cpu}"
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= {
            *compose["volumes"],
            "${RUNS",
            "/var/run/docker.sock",
        }


def test_the_compose_run_asks_for_what_its_services_have(compose: dict[str, Any]) -> None:
    places: dict[str, float] = {}
    for service in compose["services"].values():
        for option in ray_start_options(service):
            if option.startswith("--resources="):
                places.update(json.loads(option.partition("=")[2]))
    script = compose["services"]["head"]["command"][0].replace("$$", "$")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0
    assert f"cluster={IN_IMAGE.rstrip('/')}\n" in script
    assert f"train_when_ready.sh {len(compose['services'])} $cluster/{FOUR_NODES.name}" in script
    settings = overrides(script.partition(FOUR_NODES.name)[2])
    config = load_config(FOUR_NODES, settings)
    assert config.inference.server_resources == {"CPU": 1, "servers": 1}
    assert config.learner.rank_resources == {"CPU": 1, "ranks": 1}
    wanted = {"envs": config.rollout.workers, "servers": config.inference.servers, "ranks": config.learner.ranks}
    assert places == wanted
