"""Flags that users of llama.cpp, Ollama and transformers try first, and what to write here instead."""

from __future__ import annotations

_LENGTH = "write --max-model-len."
_NAME = "write --served-model-name."
_WHOLE = "leave it out: the whole model is kept on the device (--device cpu or cuda)."
_MODEL = "the model is an argument of its own: octavo serve MODEL, LLM(MODEL)."
_OUTPUT = "requests say max_tokens; octavo generate and chat take --max-tokens."
_THREADS = "set the environment variable OMP_NUM_THREADS."

# Spelled as on the command line; the value completes "unknown flag …; ".
ELSEWHERE: dict[str, str] = {
    "--alias": _NAME,
    "--batch-size": "write --max-num-batched-tokens (tokens a step) or --max-num-seqs (sequences at once).",
    "--cache-type-k": "the KV cache has the model's --dtype.",
    "--cache-type-v": "the KV cache has the model's --dtype.",
    "--cont-batching": "leave it out: batching is always continuous.",
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "--flash-attn": "leave it out: --attention-backend auto takes the fastest that is there.",
    "--gpu-layers": _WHOLE,
    "--gpus": "CUDA_VISIBLE_DEVICES chooses them.",
    "--hf-repo": _MODEL,
    "--jinja": "leave it out: chat templates are always used.",
    "--max-length": "write --max-model-len (octavo serve), or --max-tokens (octavo generate and chat).",
    "--max-new-tokens": _OUTPUT,
    "--model-path": _MODEL,
    "--mem-fraction-static": "write --gpu-memory-utilization.",
    "--n-gpu-layers": _WHOLE,
    "--n-predict": _OUTPUT,
    "--num-ctx": _LENGTH,
    "--num-predict": _OUTPUT,
    "--parallel": "write --max-num-seqs.",
    "--threads": _THREADS,
    "--tp": "write --tensor-parallel-size, or -tp.",
    "-a": _NAME,
    "-b": "write --max-num-batched-tokens.",
    "-c": _LENGTH,
    "-cb": "leave it out: batching is always continuous.",
    "-fa": "leave it out: --attention-backend auto takes the fastest that is there.",
    "-hf": _MODEL,
    "-m": _MODEL,
    "-n": _OUTPUT,
    "-ngl": _WHOLE,
    "-np": "write --max-num-seqs.",
    "-p": "it is --port here; octavo generate takes the prompt as an argument.",
    "-t": _THREADS,
}
