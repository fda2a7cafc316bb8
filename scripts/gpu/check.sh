#!/usr/bin/env bash
# Correctness and speed on a CUDA machine in one call: every test that uses a GPU where there is one, in several processes side by
# side, each with its output in OUTDIR; a line for each, and status 1 if any failed. Prepare the wheels with scripts/gpu/wheels.sh.
# With a benchmark script it is run on every model folder (config.json alone is enough) of MODELS, after the tests, by itself.
#   usage: scripts/gpu/check.sh MODELS OUTDIR [offline benchmark script]
set -u
models=${1:?MODELS} out=${2:?OUTDIR} offline=${3:-}
. scripts/gpu/setup.sh .whl
mkdir -p "$out"
status=0

if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "FAILED: torch sees no CUDA GPU here, so every GPU test would be skipped"
    exit 1
fi

names=() pids=()
# start NAME WORDS OF PYTEST: in the background, output in $out/NAME.txt
start() {
    local name=$1
    shift
    timeout "${CHECK_SECONDS:-300}" python3 -m pytest -p no:cacheprovider "$@" > "$out/$name.txt" 2>&1 &
    names+=("$name") pids+=($!)
}
kernels=tests/kernels
for file in tests/kernels_gpu/test_*.py; do
    name=${file##*/test_}
    case $name in *_interpreted.py) continue ;; esac
    start "${name%.py}" "$file"
done
start linear $kernels/test_triton_linear.py
start rows $kernels/test_triton_rows.py $kernels/test_triton_elementwise.py $kernels/test_triton_bench.py
start sampling $kernels/test_triton_sampling.py $kernels/test_token_bitmask.py
start engine tests/e2e/test_gpu_engine.py
start captures tests/e2e/test_gpu_captures.py
start bfloat16 tests/e2e/test_bfloat16.py
others="chunks or swapped or recomputed or means or states or encoder"
start syncs tests/e2e/test_gpu_syncs.py -k "not ($others)"
start syncs_others tests/e2e/test_gpu_syncs.py -k "$others"
start swap tests/executor/test_swap.py
start embeddings tests/e2e/test_gpu_embeddings.py
start weights tests/weights/test_streaming.py
start gguf tests/weights/test_gguf.py -m gpu

for i in "${!pids[@]}"; do
    wait "${pids[$i]}"
    code=$? file=$out/${names[$i]}.txt
    # A run in which all tests were skipped ends with 0, and has shown nothing.
    if [ $code -eq 0 ] && ! grep -q '[0-9] passed' "$file"; then code="0, but none passed"; fi
    case $code in
        0) word=ok ;;
        124) word="FAILED (out of time)" ;;
        *) word="FAILED (status $code)" ;;
    esac
    printf '%-22s %s: %s\n' "${names[$i]}" "$word" "$(tail -1 "$file")"
    if [ "$word" != ok ]; then
        status=1
        grep -E '^(FAILED|ERROR|E  )' "$file" | head -20
    fi
done

if [ -n "$offline" ]; then
    for model in "$models"/*; do
        name=offline_$(basename "$model")
        timeout 150 python3 "$offline" octavo "$model" > "$out/$name.txt" 2>&1 || { status=1; printf '%s FAILED: ' "$name"; }
        tail -1 "$out/$name.txt"
    done
fi
exit $status
