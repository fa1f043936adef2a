#!/bin/bash
# Train on several machines that share this checkout, with nothing but ssh. In the checkout:
#
#     GPUS=8 bash docs/jobs/ssh_nodes.sh "node1 node2" RECIPE OPTIONS...
#
# Ctrl-C, or SIGTERM to this script, saves on all machines and ends the run. All machines need the checkout and .venv at
# the same path, and the first machine's port 29500.
set -uo pipefail
read -ra hosts <<<"$1"
shift
recipe=$(printf '%q ' "$@")
pids=$(mktemp -d "$PWD/.ssh_nodes.XXXXXX")
trap 'rm -rf "$pids"' EXIT

save_and_end() {
    signalled=yes
    for rank in "${!hosts[@]}"; do
        if [ -s "$pids/$rank" ]; then ssh "${hosts[$rank]}" "kill -TERM $(cat "$pids/$rank")"; fi
    done
}
trap save_and_end INT TERM

clients=()
for rank in "${!hosts[@]}"; do
    command="cd $(printf '%q' "$PWD") && echo \$\$ > $(printf '%q' "$pids/$rank") && exec .venv/bin/python -m \
rlkit.runs.torchrun --nnodes=${#hosts[@]} --node-rank=$rank --nproc-per-node=${GPUS:-8} \
--master-addr=${hosts[0]} --master-port=29500 --shutdown-timeout=600 $recipe"
    setsid ssh "${hosts[$rank]}" "$command" & # a session of its own, which Ctrl-C does not reach
    clients+=($!)
done

code=0
for client in "${clients[@]}"; do
    while true; do
        signalled=""
        wait "$client"
        ended=$?
        if [ -z "$signalled" ] || [ "$ended" -le 128 ]; then break; fi # else the signal ended `wait`, not the machine
    done
    if [ "$ended" -ne 0 ]; then code=$ended; fi
done
exit "$code"
