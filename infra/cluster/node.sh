#!/bin/sh
# Starts Ray on this machine as the farm needs it: token, GPUs by UUID, none of Ray's own memory killer.
#   infra/cluster/node.sh head             the first; then, with its address, on every other machine:
#   infra/cluster/node.sh worker ADDRESS
# Further options go to `ray start`, as in --block. RAY_PORT: the head's port (default 6379).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${GPUFARM_BIN:-$root/.venv/bin}
role=${1:-}
case $role in
    head) shift ;;
    worker) [ $# -ge 2 ] || { echo "error: the head's address? node.sh worker ADDRESS" >&2; exit 2; }
        head=$2; shift 2 ;;
    *) echo "error: node.sh head, or node.sh worker ADDRESS" >&2; exit 2 ;;
esac
if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
    echo "error: no token; make one on the head with 'ray get-auth-token --generate' and copy ~/.ray/auth_token" >&2
    exit 2
fi
export RAY_AUTH_MODE=token
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_memory_monitor_refresh_ms=0  # it kills actors; each worker watches its own trial's memory
export RAY_USAGE_STATS_ENABLED=0
# By UUID, and without the GPU that drives a display.
gpus=$("$bin/python" -c '
from workers.devices.cuda import discover_gpus
print(",".join(gpu.uuid for gpu in discover_gpus().usable))')
export CUDA_VISIBLE_DEVICES="$gpus"
store=--object-store-memory=${RAY_STORE_BYTES:-268435456}
count=--num-gpus=$(printf '%s' "$gpus" | tr ',' '\n' | grep -c . || true)
if [ "$role" = head ]; then
    exec "$bin/ray" start --head "--port=${RAY_PORT:-6379}" --include-dashboard=false "$store" "$count" "$@"
fi
exec "$bin/ray" start "--address=$head:${RAY_PORT:-6379}" "$store" "$count" "$@"
