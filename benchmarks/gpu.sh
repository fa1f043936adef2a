#!/usr/bin/env bash
# Tables of one GPU, in about five minutes: benchmarks/results/gpu.md. `benchmarks/gpu.sh --small` tries the script on
# any machine with small sizes, and prints only.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=expandable_segments:True
exec timeout 480 "$PYTHON" benchmarks/gpu.py "$@"
