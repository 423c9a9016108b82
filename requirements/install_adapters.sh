#!/bin/sh
# Makes the virtual environment in which the adapters are tested: sh requirements/install_adapters.sh VENV VENV-ADAPTERS
# It lies over VENV: it sees every package there and changes none. pip's own words go to VENV-ADAPTERS/setup.log.
set -eu
base=$1/bin/python venv=$2
here=$(cd "$(dirname "$0")" && pwd)
log=$venv/setup.log

fail() {
    echo "setup: $1" >&2
    exit 1
}

# One package has no wheel.
check_compiler() {
    headers=$("$base" -c "import sysconfig; print(sysconfig.get_path('include') + '/Python.h')")
    [ -f "$headers" ] && command -v gcc >/dev/null 2>&1 && return
    packages="gcc libc6-dev $("$base" -c "import sys; print('python%d.%d-dev' % sys.version_info[:2])")"
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 ||
        fail "a C compiler and Python's headers are needed for the tests of the adapters; install $packages"
    echo "      installing the system packages $packages"
    # shellcheck disable=SC2086
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; } \
        >>"$log" 2>&1 </dev/null || fail "apt-get install $packages failed; see $log"
}

install() {
    "$base" -m pip --python "$venv/bin/python" --disable-pip-version-check --no-input install --no-deps "$@" \
        >>"$log" 2>&1 </dev/null && return
    echo "failed"
    grep -v '^WARNING: Location' "$log" | tail -n 15 >&2
    fail "the packages of the adapters cannot be installed; all of pip's output is in $log"
}

site_of() {
    "$1" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
}

began=$(date +%s)
printf 'setup: %s with the packages that adapters are tested with ... ' "$venv"
rm -rf "$venv"
"$base" -m venv --without-pip "$venv"
: >"$log"
check_compiler
echo "import site; site.addsitedir('$(site_of "$base")')" >"$(site_of "$venv/bin/python")/below.pth"
install -r "$here/adapters.txt"
# MCP servers run in sandboxes, into which the tests put these folders.
install --target "$venv/mcp-servers" -r "$here/mcp_servers.txt"
install --target "$venv/mcp-servers-1" -r "$here/mcp_servers_1.txt"
install --target "$venv/verifiers-0.4" -r "$here/verifiers_0_4.txt"
echo "$(($(date +%s) - began)) s"
