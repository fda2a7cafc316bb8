"""Sizes of captured steps: few, so that each is soon captured, and such that products compute full tiles of rows.

In steps with prompts these go through the linear layers together with decodes, 128 rows at a time, and a tile that is not full takes
as long as one that is. So it is the rows of a step, decodes (padded) and prompt tokens together, that come in round numbers:

    decodes                       0      64     192
    prompt tokens     … of 128    128    64     –
                      … of 256    256    192    64
                      … of 512    512    448    320

No torch in here: the engine's pace knows the sizes too, and plans steps that fill them.
"""

from __future__ import annotations

from functools import cache

# Decodes alone. Products of 65 to 128 rows take as long as of 128, and of 193 to 256 often longer than of 256 (cuBLAS on an H200).
DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896)
GRAPH_PROMPT_TOKENS = 2048  # most prompt tokens of a captured step
MAX_PROMPTS = 8  # most prompts of one
MIXED_DECODES = (0, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
STEP_ROWS = (16, 64, 128, 256, 384, 512, 768, *range(1024, 1 << 14, 512))
LONG = 512  # steps that no graph holds are so long that a finer measure is of no use
MULTIPLE = 16  # kernels are compiled apart for sizes that this divides


def decode_sizes(max_rows: int) -> list[int]:
    """To how many rows steps that only decode are padded, up to ``max_rows``.

    Padding costs little: attention skips it, and below some hundred rows the layers wait for their weights. A graph costs some
    ten milliseconds at its first use.
    """
    return [s for s in (*DECODES, *range(1024, max_rows + 1, 256)) if s < max_rows] + [max_rows]


def mixed_decodes(max_rows: int) -> list[int]:
    """To what decodes beside prompts are padded; the last is ``max_rows``."""
    return [s for s in MIXED_DECODES if s < max_rows] + [max_rows]


@cache
def _filling(decodes: int) -> tuple[int, ...]:
    """The prompt tokens that fill tiles beside ``decodes``, which are padded already."""
    return tuple((rows - decodes) // MULTIPLE * MULTIPLE for rows in STEP_ROWS if rows - decodes >= MULTIPLE)


def askable_sizes(decodes: int, max_rows: int, most: int, token_budget: int | None) -> list[int]:
    """Those of ``prompt_sizes`` beside ``decodes`` (one of ``mixed_decodes``) to which a step of at most ``token_budget`` tokens can be
    padded, of them ``most`` of prompts."""
    fewest = max((size + 1 for size in mixed_decodes(max_rows) if size < decodes), default=0)
    left = most if token_budget is None else min(most, token_budget - fewest)
    sizes = prompt_sizes(decodes)
    return [size for size, smaller in zip(sizes, (0, *sizes)) if smaller < left]


@cache
def prompt_sizes(decodes: int) -> tuple[int, ...]:
    """To what prompt tokens beside ``decodes``, which are padded already, are padded; the last is GRAPH_PROMPT_TOKENS."""
    return tuple(sorted({GRAPH_PROMPT_TOKENS, *(min(size, GRAPH_PROMPT_TOKENS) for size in _filling(decodes))}))


def filling_tokens(decodes: int, tokens: int, max_rows: int) -> int:
    """The most prompt tokens, at most ``tokens``, that make a full step of one of the sizes with ``decodes``; 0 if none do."""
    padded = next((s for s in mixed_decodes(max_rows) if s >= decodes), decodes)
    if tokens > GRAPH_PROMPT_TOKENS:
        return max(0, (padded + tokens) // LONG * LONG - padded)
    return max((size for size in _filling(padded) if size <= tokens), default=0)
