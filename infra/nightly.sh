#!/bin/sh
# One growth cycle: what the systemd timer and the cron line start.
#   infra/nightly.sh [KEY=VALUE ...]     of farm.grow; default n=500
# The data folder is $GPUFARM_DATA, else ./data. Exit code: farm.grow's own, 75 when another cycle runs on the folder.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- n=500
cd "$root"
# Replace this process, so that a SIGTERM reaches the cycle.
exec env GPUFARM_DATA="${GPUFARM_DATA:-$root/data}" "${GPUFARM_PYTHON:-$root/.venv/bin/python}" -m farm.grow "$@"
