"""allowed_token_ids that other parameters forbid, all of them: a refusal, since some token must come."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import SamplingParams
from octavo.errors import RequestError

WORDS = {"yes": [[5], [6]], "no way": [[7, 8]]}
EOS = [2]


def resolve(**fields: Any) -> Any:
    params = SamplingParams(max_tokens=8, **fields)
    return params.to_token_params(
        prompt_len=3, max_model_len=64, vocab_size=100, eos_token_ids=EOS, encode_bad_word=lambda word: WORDS[word]
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": [5], "bad_words": ["yes"]}, "bad_words forbid all"),
        ({"allowed_token_ids": [6, 5, 5], "bad_words": ["yes"]}, "bad_words forbid all"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens 1 forbids"),
        ({"allowed_token_ids": [2, 9], "min_tokens": 3, "stop_token_ids": [9]}, "min_tokens 3 forbids"),
        ({"allowed_token_ids": [2, 5], "min_tokens": 3, "bad_words": ["yes"]}, "min_tokens 3 forbids"),
    ],
)
def test_nothing_left(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        resolve(**fields)
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5, 9], "bad_words": ["yes"]},
        {"allowed_token_ids": [7], "bad_words": ["no way"]},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2, 3], "min_tokens": 3},
        {"allowed_token_ids": [9], "stop_token_ids": [9]},
        {"min_tokens": 3, "bad_words": ["yes"]},
    ],
)
def test_something_left(fields: dict[str, Any]) -> None:
    assert resolve(**fields).allowed_token_ids == (tuple(fields["allowed_token_ids"]) if "allowed_token_ids" in fields else None)
