#!/usr/bin/env bash
# Waits until a Ray cluster has enough nodes, then trains: train_when_ready.sh NODES CONFIG [KEY=VALUE ...]
# Runs on a node of the cluster.
#   START_TIMEOUT_S    seconds that the nodes may take to join (300)
set -euo pipefail

wanted=${1:?train_when_ready.sh NODES CONFIG [KEY=VALUE ...]} config=${2:?train_when_ready.sh NODES CONFIG [KEY=VALUE ...]}
shift 2
deadline=$((SECONDS + ${START_TIMEOUT_S:-300}))

nodes() { # those that are alive
    timeout 30 ray status 2>/dev/null | sed -n '/^Active:/,/^Pending:/p' | grep -c ' node_' || true
}

until [ "$(nodes)" -ge "$wanted" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "of $wanted nodes only $(nodes) joined Ray within ${START_TIMEOUT_S:-300} s; their logs say why" >&2
        exit 1
    fi
    sleep 2
done
exec roll-flash train "$config" ray.address=auto "$@"
