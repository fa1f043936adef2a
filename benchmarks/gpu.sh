#!/usr/bin/env bash
# Tables of one GPU, in an estimated seven minutes: benchmarks/results/gpu.md. It ends within eight minutes in any case;
# each table is written as soon as it is finished. `benchmarks/gpu.sh --small` tries the script on any machine with small
# sizes, and prints only. It uses the environment of `make gpu` where there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    if [ -x .venv-gpu/bin/python ]; then PYTHON=.venv-gpu/bin/python; fi
fi
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=expandable_segments:True
exec timeout --kill-after=5 470 "$PYTHON" benchmarks/gpu.py "$@"
