"""Routes of OpenAI's, Anthropic's and vLLM's servers that are not here: docs/compatibility.md lists them, and their 404s say why."""

from __future__ import annotations

_BATCHES = "batches run offline: `octavo run-batch -i requests.jsonl -o answers.jsonl` takes the same files"

# Paths and all that is under them; "/…/{id}" means only what is under "/…".
NOT_SERVED: list[tuple[tuple[str, ...], str]] = [
    (("/v1/files", "/v1/batches", "/v1/uploads"), _BATCHES),
    (("/v1/audio", "/v1/images", "/v1/videos"), "models take text and answer in text"),
    (("/v1/moderations",), "there is no moderation model; ask the served model in a chat with a json_schema"),
    (("/v1/fine_tuning", "/v1/evals"), "Octavo serves models, it does not train or grade them"),
    (
        ("/v1/assistants", "/v1/threads", "/v1/conversations", "/v1/vector_stores", "/v1/containers"),
        "nothing is stored here; send the whole conversation to /v1/responses or /v1/chat/completions",
    ),
    (("/v1/responses/{id}", "/v1/chat/completions/{id}"), "no answer is stored"),
    (("/v1/messages/batches",), _BATCHES),
    (("/v1/realtime",), "no audio, no websockets; /v1/chat/completions and /v1/responses stream their answers"),
    (("/pooling", "/classify"), "vectors come from /v1/embeddings, similarities from /v1/score and /v1/rerank"),
    (
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc"),
        "vLLM's routes for adapters and for developers",
    ),
]
_STORED = "/{id}"


def why_not_served(path: str) -> str | None:
    """Why there is nothing at ``path`` and what to use instead, or None for a path that no other server has either."""
    for routes, why in NOT_SERVED:
        for route in routes:
            base = route.removesuffix(_STORED)
            if (path.startswith(base + "/") and path != base + "/") or path == base == route:
                return why
    return None
