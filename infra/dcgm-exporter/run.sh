#!/bin/sh
# Starts dcgm-exporter with the farm's counter file, every 100 ms, on this machine only. Ends with Ctrl-C.
#   infra/dcgm-exporter/run.sh [PORT]     DCGM_EXPORTER_IMAGE names another release
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec docker run --rm --gpus all --cap-add SYS_ADMIN \
    -p "127.0.0.1:${1:-9400}:9400" \
    -v "$here/counters.csv:/etc/dcgm-exporter/farm-counters.csv:ro" \
    "${DCGM_EXPORTER_IMAGE:-nvidia/dcgm-exporter:4.2.3-4.1.3-ubuntu22.04}" \
    -f /etc/dcgm-exporter/farm-counters.csv -c 100
