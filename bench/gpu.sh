#!/usr/bin/env bash
# Everything a GPU is asked for, in under six minutes and without a network: bench/gpu.sh [--dry]
# Rows appear in bench/results/<gpu>.jsonl as they come, so that a run which is cut short still counts.
# --dry walks through it on a CPU with tiny sizes, to see that the scripts are in order.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
options=()
if [[ ${1:-} == --dry ]]; then
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    rows=$(mktemp)
    trap 'rm -f "$rows"' EXIT
    options=(--dry --out "$rows")
fi

failed=0
part() { # part SECONDS NAME
    echo "== $2, at most $1 s"
    timeout "$1" "$python" -m bench.gpu_attention "$2" ${options[@]+"${options[@]}"} || {
        echo "-- $2 ended with $? (124: out of time)"
        failed=1
    }
}

part 60 correctness
part 20 ceilings
part 20 host
part 70 others
part 180 tiles
exit "$failed"
