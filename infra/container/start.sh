#!/bin/sh
# What the container runs: the dispatcher, for ever. Arguments are further KEY=VALUE of farm.work.
set -eu
# A new volume has no data folder yet; a query makes none, so the first submission would have to.
python -c 'from warehouse.files.folder import DataFolder; DataFolder.resolve().create()'
exec python -m farm.work wait=true log.format=json metrics.port=9108 metrics.address=0.0.0.0 "$@"
