#!/usr/bin/env bash
# The tests that need neither torch nor an engine, on another Python: bash .ci/other_python.sh PYTHON
# The same pins as everywhere; torch and vLLM are left out (a CPU build of torch exists for one Python only, in places).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-input --no-compile \
    -c requirements/cpu.txt -c requirements/dev.txt \
    aiohttp docstring-parser gymnasium httpx jinja2 msgspec numpy psutil pydantic pyyaml rich typer setuptools wheel \
    hypothesis pytest pytest-timeout 2>&1 | grep -v "^WARNING: Location" || true
git archive HEAD | tar -x -C "$folder"
cd "$folder"
venv/bin/pip install --quiet --no-deps --no-build-isolation --editable .
venv/bin/python --version
venv/bin/python -m pytest -m "not docker and not vllm and not ray and not adapters" \
    tests/sandboxes tests/planner/test_simulate.py tests/planner/test_simulated_parts.py tests/test_config.py \
    --ignore tests/sandboxes/test_engines.py ||
    bash .ci/alone.sh venv/bin/python
