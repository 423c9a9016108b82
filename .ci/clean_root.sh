#!/usr/bin/env bash
# The README's set-up as a new user has it: a clean Debian with python3, make and git, nothing else, and a fresh clone.
# Finds a system package that a maintainer's machine has and a user's has not: a short run trains there with vLLM and
# Docker, and Debian's own Python runs tests that need neither engine nor servers, one of them a learner that resumes.
# Runs in a container of the machine's engine, with this machine's settings of pip and apt; about 10 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SUITE=bookworm
PACKAGES=python3,make,git
IMAGE=roll-flash-clean-root:$$
LIMIT_S=1500
# What an engine inside needs. Not --privileged: that asks for every capability, more than root of some machines has.
PRIVILEGES=(--cap-add ALL --cap-drop SYS_RESOURCE --security-opt seccomp=unconfined --security-opt apparmor=unconfined
    --security-opt systempaths=unconfined --sysctl net.ipv6.conf.all.disable_ipv6=0
    --volume /sys/fs/cgroup:/sys/fs/cgroup)

folder=$(mktemp -d)
cleanup() {
    docker rm --force --volumes "${IMAGE/:/-}" >/dev/null 2>&1 || true
    docker rmi --force "$IMAGE" >/dev/null 2>&1 || true
    rm -rf "$folder"
}
trap cleanup EXIT

settings=()
pass_path() { # a file or folder of the machine, read-only at the same place
    if [ -e "$1" ]; then
        settings+=(--volume "$1:$1:ro")
    fi
}

pass_pip_settings() {
    local name value
    while IFS='=' read -r name value; do
        case $name in
        PIP_CERT | *_CA_BUNDLE | SSL_CERT_FILE) ;;
        PIP_* | *_proxy | *_PROXY) settings+=(--env "$name=$value") ;;
        esac
    done < <(env)
    # Wheels and indexes on this disk.
    for value in $(python3 -m pip config list | grep -v cert | grep -o "/[^' ]*" | sort -u); do
        case $value in //*) ;; *) pass_path "$value" ;; esac
    done
    pass_path /etc/pip.conf
    if [ -f "$HOME/.config/pip/pip.conf" ]; then
        settings+=(--volume "$HOME/.config/pip/pip.conf:/root/.config/pip/pip.conf:ro")
    fi
    # Elsewhere than on this machine: the package ca-certificates writes its own file to the usual place.
    value=$(python3 -m pip config list | sed -n "s/.*cert='\(.*\)'/\1/p" | tail -n 1)
    if [ -n "$value" ]; then
        settings+=(--volume "$value:/certificates.crt:ro" --env PIP_CERT=/certificates.crt --env SSL_CERT_FILE=/certificates.crt)
    fi
}

pass_apt_settings() {
    local path
    for path in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf /etc/apt/apt.conf.d \
        /etc/apt/keyrings /etc/apt/trusted.gpg /etc/apt/trusted.gpg.d; do
        pass_path "$path"
    done
}

in_the_clean_root() {
    cat <<'INSIDE'
set -eu
git clone --quiet /source /root/checkout
cd /root/checkout
make setup engine image model .venv-docs/installed
.venv/bin/roll-flash doctor
.venv/bin/roll-flash doctor --json >/root/doctor.json
.venv/bin/python - <<'CHECK'
import json, sys
missing = [check["name"] for check in json.load(open("/root/doctor.json"))["checks"] if not check["ok"]]
sys.exit(f"the set-up left out: {', '.join(missing)}" if missing else 0)
CHECK
.venv/bin/python --version
timeout --signal=INT --kill-after=60 600 \
    .venv/bin/python tests/leaks.py .venv/bin/roll-flash train configs/ci.yaml name=ci runs=/root/runs
.venv/bin/python .ci/check_run.py /root/runs/ci
CI= .venv/bin/python -m pytest -m "not docker and not vllm and not ray and not adapters" \
    tests/sandboxes/test_archives.py tests/sandboxes/test_abuse_files.py tests/sandboxes/test_frames.py tests/test_setup.py \
    tests/learner/test_steps.py::test_a_resumed_run_takes_the_very_same_next_step ||
    bash .ci/alone.sh .venv/bin/python
INSIDE
}

if ! command -v debootstrap >/dev/null; then # the set-up installs it only where no image registry answers
    apt-get update -qq
    apt-get install --quiet=2 --yes --no-install-recommends debootstrap >/dev/null
fi
echo "clean root: $SUITE with $PACKAGES"
debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "$folder/root" >"$folder/debootstrap.log" 2>&1 ||
    { tail -n 3 "$folder/debootstrap.log" >&2; exit 1; }
[ -z "$(ls /etc/apt/sources.list.d)" ] || rm "$folder/root/etc/apt/sources.list"
tar -C "$folder/root" --exclude=./dev -c . | docker import - "$IMAGE" >/dev/null
rm -rf "$folder/root"
pass_pip_settings
pass_apt_settings
in_the_clean_root >"$folder/inside.sh"
timeout --kill-after=30 "$LIMIT_S" docker run --name "${IMAGE/:/-}" "${PRIVILEGES[@]}" --shm-size=1g \
    --volume /var/lib/docker --volume "$PWD:/source:ro" --volume "$folder/inside.sh:/inside.sh:ro" \
    --env HOME=/root --env LC_ALL=C.UTF-8 "${settings[@]}" "$IMAGE" sh /inside.sh
