#!/usr/bin/env bash
# Correctness and speed on a CUDA machine in one call; prints a short table last. Prepare the wheels with scripts/gpu/wheels.sh, and the
# model folders (config.json alone is enough) in $1.   usage: scripts/gpu/check.sh MODELS OUTDIR [offline benchmark script]
set -u
models=${1:?MODELS} out=${2:?OUTDIR} offline=${3:-}
. scripts/gpu/setup.sh .whl
timeout 200 python3 -m pytest -q -p no:cacheprovider tests/kernels_gpu tests/e2e/test_gpu_engine.py > "$out/tests.txt" 2>&1
tail -12 "$out/tests.txt"
for model in "$models"/*; do
    if [ -n "$offline" ]; then
        timeout 150 python3 "$offline" octavo "$model" > "$out/offline_$(basename "$model").txt" 2>&1
        tail -1 "$out/offline_$(basename "$model").txt"
    fi
done
