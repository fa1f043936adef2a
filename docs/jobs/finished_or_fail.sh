#!/bin/bash
# Run a command that trains, and exit with 0 only if the run in a directory is finished.
#
#     finished_or_fail.sh RUN_DIRECTORY COMMAND...
#
# A recipe that SIGTERM ends exits with 0, although steps are left. Kubernetes and SkyPilot would take that for a finished
# job. This script passes SIGTERM on, waits, and exits with 75 if steps are left.
set -uo pipefail
out=$1
shift

child="" told=""
trap 'signalled=yes; told=yes; kill -TERM "$child" 2>/dev/null' TERM INT
"$@" &
child=$!
if [ -n "$told" ]; then kill -TERM "$child"; fi # the signal came before there was anything to pass it to
while true; do
    signalled=""
    wait "$child"
    code=$?
    if [ -z "$signalled" ] || [ "$code" -le 128 ]; then break; fi # else the signal ended `wait`, not the command
done
if [ "$code" -ne 0 ]; then exit "$code"; fi
if grep -qs '"steps"' "$out/eval.json"; then exit 0; fi # written last, when the model has been exported
echo "finished_or_fail.sh: $out has steps left" >&2
exit 75
