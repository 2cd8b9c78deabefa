#!/bin/bash
#SBATCH --job-name=gpufarm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@900
# Ray inside an allocation, and the farm on it. From the checkout, which every node must see:
#   sbatch infra/cluster/slurm.sh +arch=cnn n=5000 data=FOLDER       a job: what farm.submit takes
#   sbatch infra/cluster/slurm.sh                                    what is queued in $GPUFARM_DATA: farm.work
# 15 minutes before the time is up the farm is asked to leave; the same command goes on where it was.
set -euo pipefail
root=${SLURM_SUBMIT_DIR:-$PWD}
cd "$root"
bin=${GPUFARM_BIN:-$root/.venv/bin}

# One token, one port for this allocation: other jobs may share its nodes.
RAY_AUTH_TOKEN=$("$bin/python" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_PORT=$((20000 + SLURM_JOB_ID % 20000))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(getent ahostsv4 "$head" | awk '{ print $1; exit }')

trap 'kill "${ray[@]}" 2>/dev/null || true' EXIT
ray=()
srun --nodes=1 --ntasks=1 --nodelist="$head" infra/cluster/node.sh head --node-ip-address="$address" --block &
ray+=($!)
for _ in $(seq 60); do
    if (exec 3<>"/dev/tcp/$address/$RAY_PORT") 2>/dev/null; then break; fi
    sleep 2
done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" infra/cluster/node.sh worker "$address" --block &
    ray+=($!)
done

# Nodes that come a moment later get their workers then. The batch script is on the first node, as is Ray's head.
if [ $# -gt 0 ]; then command=(farm.submit "$@"); else command=(farm.work); fi
"$bin/python" -m "${command[@]}" "cluster.address=$address:$RAY_PORT" &
farm=$!
trap 'kill -TERM $farm' TERM INT
code=0
wait "$farm" || code=$?
if kill -0 "$farm" 2>/dev/null; then  # the signal ended the first wait, not the farm
    code=0
    wait "$farm" || code=$?
fi
exit "$code"
