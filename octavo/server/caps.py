"""Most that one request may bring or ask for, where its schema and --max-body-size leave more than anybody needs.

What these hold off are requests that are small and cause much: an id that is copied into every chunk, stop strings that
every character is held against, candidates' log-probabilities of many long answers in one piece.
"""

from __future__ import annotations

from octavo.errors import RequestError
from octavo.server.schemas import GenerationRequest

MAX_ID_CHARS = 256  # request_id is written into every chunk
MAX_SALT_CHARS = 1024
MAX_STOP_CHARS = 4096  # of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORD_CHARS = 1024  # of one word
MAX_LOGPROBS_AT_ONCE = 1 << 22  # entries in an answer that is not streamed; some 100 bytes each


def check_sizes(request: GenerationRequest, vocab_size: int) -> None:
    """RequestError that names the field, what it may have, and what it has."""
    for name, limit in (("request_id", MAX_ID_CHARS), ("cache_salt", MAX_SALT_CHARS)):
        value = getattr(request, name)
        if value is not None and len(value) > limit:
            raise RequestError(f"{name} takes at most {limit} characters, got {len(value)}.", param=name)
    for name, limit in (("stop", MAX_STOP_CHARS), ("bad_words", MAX_BAD_WORD_CHARS)):
        words = getattr(request, name)
        longest = max(map(len, [words] if isinstance(words, str) else words or ()), default=0)
        if longest > limit:
            raise RequestError(f"{name} takes strings of at most {limit} characters, got one of {longest}.", param=name)
    for name, limit in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", vocab_size)):
        ids = getattr(request, name)
        if ids is not None and len(ids) > limit:
            raise RequestError(f"{name} takes at most {limit} token ids, got {len(ids)}.", param=name)


def check_logprobs_size(choices: int, tokens: int, logprobs: int | None) -> None:
    """RequestError for an answer in one piece that would hold too many log-probabilities. ``tokens``: most of one choice."""
    if logprobs is not None and choices * tokens * (logprobs + 1) > MAX_LOGPROBS_AT_ONCE:
        raise RequestError(
            f"{choices} choices of up to {tokens} tokens with {logprobs} logprobs each are too many for one answer; ask for fewer, "
            "set max_tokens, or use stream: true.",
            param="logprobs",
        )


def check_prompt_logprobs_size(tokens: int, logprobs: int | None, name: str) -> None:
    """The same for log-probabilities of prompts with ``tokens`` tokens together; ``name``: the field that asks for them."""
    if logprobs is not None and tokens * (logprobs + 1) > MAX_LOGPROBS_AT_ONCE:
        raise RequestError(
            f"{tokens} prompt tokens with {logprobs} logprobs each are too many for one answer; ask for fewer, or send fewer prompts at "
            "a time.",
            param=name,
        )
