#!/bin/sh
# One growth cycle, alone: what the systemd timer and the cron line start.
#   infra/nightly.sh [KEY=VALUE ...]     of farm.grow; default n=500
# The data folder is $GPUFARM_DATA, else ./data. Exit code: farm.grow's own; 75 when another cycle runs on the folder.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
data=${GPUFARM_DATA:-$root/data}
python=${GPUFARM_PYTHON:-$root/.venv/bin/python}
[ $# -gt 0 ] || set -- n=500
mkdir -p "$data/locks"
cd "$root"
# The kernel drops the lock with the process, however that ends.
exec env GPUFARM_DATA="$data" flock --nonblock --conflict-exit-code 75 "$data/locks/nightly.lock" \
    "$python" -m "${GPUFARM_NIGHTLY_MODULE:-farm.grow}" "$@"
