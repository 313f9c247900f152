#!/usr/bin/env bash
# Everything a GPU is asked for, in under eight minutes and without a network: bench/gpu.sh [--dry]
# The most valuable comes first. Rows go to bench/results/<gpu>.jsonl as they come, so that a run which is cut
# short still counts; `python -m bench.report` then makes tables and plots of them.
# --dry walks through all of it on a CPU with tiny sizes, to see that the scripts are in order.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
dry=()
tiny=()
rows=(--json)
if [[ ${1:-} == --dry ]]; then
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    rows=(--json "$scratch/rows.jsonl")
    dry=(--dry --budget 0)
    tiny=(--version tiny --size tiny --layers 2 --repeats 1 --against sdpa)
fi

failed=0
part() { # part SECONDS COMMAND ...
    local limit=$1
    shift
    echo "== $*, at most $limit s"
    timeout "$limit" "$python" -m "$@" "${rows[@]}" || {
        echo "-- ended with $? (124: out of time)"
        failed=1
    }
}

# 1. are the kernels right, and how does attention compare
part 100 bench.kernels varlen_attention --case "16 x 512^2" "2 x 1024^2" "mix of 32" --tower H SO400M ${dry[@]+"${dry[@]}"}
# 2. the whole model against Transformers'
part 60 bench.encoder --part race host flat --against sdpa eager ${tiny[@]+"${tiny[@]}"}
# 3. the other kernels against a copy
part 70 bench.kernels layerscale_residual_norm gelu embed_tokens patchify patchify_list qk_rms_norm_ layer_norm \
    --case "16 x 512^2" "mix of 32" ${dry[@]+"${dry[@]}"}
# 4. tiles, from which _config is chosen
part 110 bench.tune varlen_attention --tower H SO400M B --case "16 x 512^2" "2 x 1024^2" "mix of 32" ${dry[@]+"${dry[@]}"}
part 25 bench.tune layerscale_residual_norm --tower H --case "16 x 512^2" ${dry[@]+"${dry[@]}"}
part 25 bench.tune gelu --tower H --case "16 x 512^2" ${dry[@]+"${dry[@]}"}
# 5. what a fresh process pays, and where the time goes
part 35 bench.encoder --part startup profile ${tiny[@]+"${tiny[@]}"}
# 6. both compiled, which takes longest
part 50 bench.encoder --part race --against compiled ${tiny[@]+"${tiny[@]}"}
exit "$failed"
