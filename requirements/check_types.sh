#!/bin/sh
# Runs mypy --strict on the packages as a user gets them: sh requirements/check_types.sh VENV/bin
# The wheel is built and unpacked, so that a file which the package list forgets, or imports by the wrong path, shows.
set -eu
root=$(pwd)
bin=$(cd "$1" && pwd)
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
trap 'exit 130' INT TERM
rm -rf build # setuptools would pack modules that were deleted since
"$bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$unpacked/wheel" . >"$unpacked/log" 2>&1 || {
    cat "$unpacked/log" >&2
    exit 1
}
"$bin/python" -m zipfile -e "$unpacked"/wheel/*.whl "$unpacked/site"
cd "$unpacked/site"
"$bin/mypy" --strict --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" \
    --python-executable "$bin/python" roll_flash
