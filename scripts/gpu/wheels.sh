#!/usr/bin/env bash
# Collect the wheels that a bare CUDA + PyTorch machine lacks (Python 3.12, x86-64, torch 2.11), so that Octavo and its
# GPU tests run there without a network.   usage: scripts/gpu/wheels.sh [OUTDIR]     (default .whl; kept out of git)
# There: python3 -m pip install --no-index --no-deps --target SITE OUTDIR/*.whl
set -euo pipefail
out=${1:-.whl}
mkdir -p "$out"
platforms=$(for n in $(seq 5 39); do printf -- '--platform manylinux_2_%s_x86_64 ' "$n"; done
            for p in 2014 2010 1; do printf -- '--platform manylinux%s_x86_64 ' "$p"; done)
# shellcheck disable=SC2086
python3 -m pip download -q --no-deps --python-version 3.12 --implementation cp --only-binary=:all: $platforms -d "$out" \
    msgspec pyzmq starlette uvicorn httptools uvloop prometheus-client llguidance gguf rich markdown-it-py mdurl pygments \
    anyio sniffio h11 click openai httpx httpcore jiter distro pydantic pydantic-core annotated-types typing-inspection \
    idna certifi pytest pluggy iniconfig hypothesis sortedcontainers pytest-timeout pytest-asyncio
# FlashAttention 3, prebuilt; nearly as large as all that one transfer may hold, so it has a folder of its own.
# shellcheck disable=SC2086
python3 -m pip download -q --no-deps --python-version 3.12 --implementation cp --only-binary=:all: $platforms -d "$out-fa3" tokenspeed-fa3
du -sh "$out" "$out-fa3"
