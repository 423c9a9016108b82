#!/usr/bin/env bash
# Sends a run to a Ray cluster that is there already: submit.sh CONFIG [KEY=VALUE ...]
# The driver then runs on the cluster's head, where CONFIG and the folder of runs are looked for.
#   RAY_API_SERVER_ADDRESS    http://HEAD:8265; the head was started with --include-dashboard=true --dashboard-host=0.0.0.0
#   RAY_AUTH_TOKEN            the cluster's token
#   WORKING_DIR               folder to send along, with environments and configs of your own (none)
#   STOP_TIMEOUT_S            seconds that `ray job stop` leaves the run for its last checkpoint (300)
set -euo pipefail

config=${1:?submit.sh CONFIG [KEY=VALUE ...]}
shift
: "${RAY_API_SERVER_ADDRESS:?set it to the address of the cluster, such as http://10.0.0.1:8265}"
: "${RAY_AUTH_TOKEN:?set it to the token of the cluster}"
export RAY_AUTH_MODE=token

options=(--runtime-env-json "{\"env_vars\": {\"RAY_JOB_STOP_WAIT_TIME_S\": \"${STOP_TIMEOUT_S:-300}\"}}")
if [ -n "${WORKING_DIR:-}" ]; then
    options+=(--working-dir "$WORKING_DIR")
fi
exec ray job submit "${options[@]}" -- roll-flash train "$config" ray.address=auto "$@"
