#!/usr/bin/env bash
# `make demo`: the main job, small. Sample, run, query, fit, estimate; every command is shown before it runs.
set -euo pipefail
export GPUFARM_DATA="${GPUFARM_DATA:-demo-data}"
export COLUMNS="${COLUMNS:-120}"

say() { printf '\n%s\n' "$*"; }
show() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
run() { show "$*"; "$@"; }

say "1. Sample 64 CNNs and run them. Without a GPU, their training steps are traced and priced for a simulated one."
run python -m farm.submit +arch=cnn n=64

say "2. Look at the rows. A run that did not fit is a row too."
sql="SELECT source, status, count(*) AS runs, round(median(peak_memory_mib)) AS median_peak_mib,
       round(median(step_time_ms), 1) AS median_step_ms, round(avg(smact), 3) AS smact, round(avg(drama), 3) AS drama
FROM runs GROUP BY ALL ORDER BY runs DESC"
show "python -m warehouse.query \"$sql\""
python -m warehouse.query "$sql"

say "3. Learn memory and SM activity from these rows alone. So few make a rough model, and its bound says so."
run python -m learn.fit target=memory estimator=lightgbm
run python -m learn.fit target=smact estimator=lightgbm

say "4. Run 8 more, which the models have not seen: the same command with a larger n."
run python -m farm.submit +arch=cnn n=72

say "5. Estimate one of them, beside what its run showed."
newest="SELECT run_id FROM runs WHERE status = 'ok' ORDER BY task_index DESC LIMIT 1"
run_id=$(python -m warehouse.query "$newest" format=csv | tail -n 1)
run python -m learn.estimate "run=$run_id"

cat <<TEXT

Done. The runs are in $GPUFARM_DATA. What to try next:

  export GPUFARM_DATA=$GPUFARM_DATA
  python -m farm.submit +arch=cnn n=500                 # more rows, then fit again: the errors and the bound shrink
  python -m learn.fit target=memory                     # the default estimator, which corrects the trace's figure
  python -m farm.submit +arch=transformer n=100 device=H200-SXM-141GB
  python -m farm.submit +arch=mlp n=20 device=cpu window.max_seconds=5   # really train, on the CPU
  python -m farm.status
  python -m warehouse.query "SELECT config->>'topology' AS topology, status, count(*) FROM runs GROUP BY ALL ORDER BY ALL"
  python -m farm.grow n=40 dry_run=true                 # what a night would measure; without dry_run: measures it
  python -m farm.doctor                                 # what this machine offers

(in the environment that was made: source .venv/bin/activate)
TEXT
