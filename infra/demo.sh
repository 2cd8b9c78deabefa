#!/usr/bin/env bash
# `make demo`: the main job, small. Sample, run, query, fit, estimate; every command is shown before it runs.
set -euo pipefail
export GPUFARM_DATA="${GPUFARM_DATA:-demo-data}"
target=drama

show() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
run() { show "$*"; "$@"; }
export COLUMNS="${COLUMNS:-120}"

run python -m farm.submit +arch=cnn n=64

show 'python -m warehouse.query "SELECT family, source, status, count(*) ..."'
python -m warehouse.query "
  SELECT family, source, status, count(*) AS runs,
         round(median(peak_memory_mib)) AS median_peak_mib,
         round(median(step_time_ms), 1) AS median_step_ms,
         round(avg(smact), 3) AS smact, round(avg(smocc), 3) AS smocc, round(avg(drama), 3) AS drama
  FROM runs GROUP BY ALL ORDER BY runs DESC"

# The runs of this folder come from one source: simulated where there is no GPU, measured where there is one.
run python -m learn.fit "target=$target"

config=$(python -m warehouse.query "SELECT run_id FROM runs WHERE status = 'ok' ORDER BY task_index LIMIT 1" format=csv | tail -n 1)
run python -m learn.estimate "run=$config"

cat <<TEXT

Done. The runs are in $GPUFARM_DATA. What to try next:

  export GPUFARM_DATA=$GPUFARM_DATA
  python -m farm.submit +arch=mlp n=500                 # another family; the same command again adds nothing
  python -m farm.submit +arch=transformer n=100 device=H200-SXM-141GB
  python -m farm.submit +arch=mlp n=20 device=cpu window.max_seconds=5   # really train, on the CPU
  python -m farm.status
  python -m warehouse.query "SELECT config->>'topology' AS topology, status, count(*) FROM runs GROUP BY ALL ORDER BY ALL"
  python -m learn.fit target=memory
  python -m farm.grow n=40 dry_run=true                 # what a night would measure; without dry_run: measures it
  python -m farm.doctor                                 # what this machine offers

(in the environment that was made: source .venv/bin/activate)
TEXT
