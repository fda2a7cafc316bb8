"""Deltas to outputs: however tokens are cut into deltas and drains, the joined output is the one that a slow truth gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.output_processor import RequestOutputs
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.tokenizer import load_tokenizer
from octavo.types import TokenDelta, TokenLogprobs
from tests.tiny_model import EOS, make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")))


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs([token, (token + 1) % 256, token], [-1.0, -0.5, -1.0], 2)


def deltas(rng: random.Random, index: int, tokens: list[int], reason: str | None, most: int) -> list[TokenDelta]:
    """``tokens`` cut at random; the last delta has the reason, and may have no token of its own (an abort)."""
    made: list[TokenDelta] = []
    at = 0
    while at < len(tokens):
        count = rng.randint(1, most)
        part = tokens[at : at + count]
        made.append(TokenDelta(request_id="r", index=index, token_ids=part, logprobs=[logprob(t) for t in part]))
        at += count
    if reason == "abort" or not made:
        made.append(TokenDelta(request_id="r", index=index, token_ids=[]))
    made[-1].finish_reason = reason  # type: ignore[assignment]
    return made


def run(outputs: RequestOutputs, queue: list[TokenDelta], rng: random.Random) -> tuple[dict[int, CompletionOutput], int]:
    """Push all, draining at random; the joined outputs, and how many aborts the processor asked for."""
    joined: dict[int, CompletionOutput] = {}
    aborts = 0
    for delta in queue:
        aborts += outputs.push(delta)
        if rng.random() < 0.5:
            merge(joined, outputs)
    merge(joined, outputs)
    return joined, aborts


def merge(joined: dict[int, CompletionOutput], outputs: RequestOutputs) -> None:
    for new in outputs.drain().outputs:
        assert new.logprobs is None or len(new.logprobs) == len(new.token_ids), "one entry a token, in every drain"
        old = joined.get(new.index)
        if old is None:
            joined[new.index] = new
            continue
        assert old.finish_reason is None, "nothing comes after the end"
        old.text += new.text
        old.token_ids += new.token_ids
        old.logprobs = None if old.logprobs is None else old.logprobs + new.logprobs
        old.cumulative_logprob, old.finish_reason, old.stop_reason = new.cumulative_logprob, new.finish_reason, new.stop_reason


def truth(text: str, stops: list[str], include: bool, min_tokens: int) -> tuple[str, int, str] | None:
    """One character is one token: (output, tokens, stop) of the first stop that is complete at min_tokens or later."""
    for end in range(max(min_tokens, 1), len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), end, stop
    return None


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_against_a_slow_truth(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        n = rng.choice([1, 1, 3])
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        include, min_tokens = rng.random() < 0.3, rng.choice([0, 0, 1, 5])
        params = SamplingParams(n=n, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=40, logprobs=1)
        texts = ["".join(rng.choice("abcdef") for _ in range(rng.randint(1, 30))) for _ in range(n)]
        reasons = [rng.choice(["length", "stop", "abort"]) for _ in range(n)]
        streams = []
        for i, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            tokens = tokenizer.encode(text) + ([EOS] if reason == "stop" else [])
            streams.append(deltas(rng, i, tokens, reason, most=rng.choice([1, 6])))
        queue = []
        while any(streams):
            queue.append(rng.choice([s for s in streams if s]).pop(0))
        outputs = RequestOutputs("r", None, [1], params, tokenizer)
        joined, aborts = run(outputs, queue, rng)
        assert outputs.finished
        asked = 0
        for i, text in enumerate(texts):
            expected, out = truth(text, stops, include, min_tokens), joined[i]
            where = (stops, include, min_tokens, text, reasons[i], out)
            assert out.cumulative_logprob == -1.0 * len(out.token_ids), where
            if expected is None:
                kept = tokenizer.encode(text) + ([EOS] if reasons[i] == "stop" else [])
                assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == (text, kept, reasons[i], None), where
            else:
                assert (out.text, len(out.token_ids), out.stop_reason) == expected and out.finish_reason == "stop", where
                asked += expected[1] < len(text) or reasons[i] != "length"
        assert aborts <= asked


@pytest.mark.parametrize("seed", range(10))
def test_text_does_not_depend_on_deltas_and_drains(tokenizer: Any, seed: int) -> None:
    """Without stop strings: characters of several tokens, cut anywhere, some broken; an end token that is hidden or not."""
    rng = random.Random(seed)
    for _ in range(40):
        tokens = tokenizer.encode("".join(rng.choice("ab é漢🐙") for _ in range(rng.randint(0, 20))))
        tokens = tokens[: rng.randint(0, len(tokens))]
        reason, keep = rng.choice(["length", "stop", "abort"]), rng.random() < 0.5
        params = SamplingParams(include_stop_str_in_output=keep, skip_special_tokens=False)
        ended = [*tokens, EOS] if reason == "stop" else tokens
        outputs = RequestOutputs("r", None, [1], params, tokenizer)
        out = run(outputs, deltas(rng, 0, ended, reason, most=rng.choice([1, 6])), rng)[0][0]
        text = tokenizer.decode(ended if keep else tokens, skip_special_tokens=False)
        assert (out.text, out.token_ids, out.finish_reason) == (text, ended, reason), (keep, tokens)


def test_text_that_nobody_reads_yet_is_decoded_all_at_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = RequestOutputs("r", None, [1], SamplingParams(), tokenizer)
    sequence, decoded = outputs.sequences[0], []
    decode = sequence.decode
    monkeypatch.setattr(sequence, "decode", lambda tokens: (decoded.append(list(tokens)), decode(tokens))[1])
    for token in tokenizer.encode("abc"):
        outputs.push(TokenDelta(request_id="r", index=0, token_ids=[token]))
    assert decoded == []
    assert outputs.drain().outputs[0].text == "abc" and decoded == [tokenizer.encode("abc")]


def test_a_stop_in_the_last_delta_asks_for_no_abort(tokenizer: Any) -> None:
    outputs = RequestOutputs("r", None, [1], SamplingParams(stop="b"), tokenizer)
    assert not outputs.push(TokenDelta(request_id="r", index=0, token_ids=tokenizer.encode("ab"), finish_reason="length"))
    out = outputs.drain().outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("a", "stop", "b")


def test_what_the_engine_sends_after_a_stop_is_dropped(tokenizer: Any) -> None:
    outputs = RequestOutputs("r", None, [1], SamplingParams(stop="b", n=2), tokenizer)
    assert outputs.push(TokenDelta(request_id="r", index=0, token_ids=tokenizer.encode("abc")))
    assert not outputs.push(TokenDelta(request_id="r", index=0, token_ids=tokenizer.encode("d")))
    assert not outputs.push(TokenDelta(request_id="r", index=0, token_ids=[], finish_reason="abort"))
    assert not outputs.finished
    first = outputs.drain().outputs
    assert [(o.index, o.text, o.finish_reason) for o in first] == [(0, "a", "stop")]
    assert outputs.drain().outputs == []


def test_a_held_back_beginning_of_a_stop_comes_with_the_end(tokenizer: Any) -> None:
    outputs = RequestOutputs("r", None, [1], SamplingParams(stop="xyz"), tokenizer)
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=tokenizer.encode("abxy")))
    assert outputs.drain().outputs[0].text == "ab"
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=[], finish_reason="abort"))
    assert outputs.drain().outputs[0].text == "xy"


def test_a_broken_character_at_the_end_is_shown_and_can_be_a_stop(tokenizer: Any) -> None:
    half = tokenizer.encode("é")[:1]
    outputs = RequestOutputs("r", None, [1], SamplingParams(), tokenizer)
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=half))
    assert outputs.drain().outputs[0].text == ""
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=[], finish_reason="length"))
    assert outputs.drain().outputs[0].text == "\ufffd"
    outputs = RequestOutputs("r", None, [1], SamplingParams(stop="\ufffd"), tokenizer)
    assert not outputs.push(TokenDelta(request_id="r", index=0, token_ids=half, finish_reason="length"))
    out = outputs.drain().outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("", "stop", "\ufffd")


def test_the_end_token_is_hidden_unless_asked_for(tokenizer: Any) -> None:
    for params, text in (
        (SamplingParams(), "a"),
        (SamplingParams(skip_special_tokens=False), "a"),
        (SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True), "a<|im_end|>"),
        (SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True, stop="zzz"), "a<|im_end|>"),
        (SamplingParams(skip_special_tokens=False, stop="zzz"), "a"),
        (SamplingParams(detokenize=False), ""),
    ):
        outputs = RequestOutputs("r", None, [1], params, tokenizer)
        outputs.push(TokenDelta(request_id="r", index=0, token_ids=[*tokenizer.encode("a"), EOS], finish_reason="stop"))
        out = outputs.drain().outputs[0]
        assert (out.text, out.token_ids, out.finish_reason) == (text, [*tokenizer.encode("a"), EOS], "stop"), params


def test_without_a_tokenizer_there_are_ids_only() -> None:
    outputs = RequestOutputs("r", None, [1], SamplingParams(logprobs=1), None)
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=[5], logprobs=[logprob(5)], finish_reason="length"))
    out = outputs.drain().outputs[0]
    assert (out.text, out.token_ids) == ("", [5]) and out.logprobs[0][5].decoded_token is None
    assert [(t, e.rank) for t, e in out.logprobs[0].items()] == [(5, 2), (6, 1)]


def test_prompt_logprobs_come_once_and_times_are_kept(tokenizer: Any, tmp_path: Path) -> None:
    outputs = RequestOutputs("r", "ab", [1, 2], SamplingParams(prompt_logprobs=1), tokenizer)
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=[5], prompt_logprobs=[logprob(2)], num_cached_tokens=1))
    first = outputs.drain()
    assert first.prompt_logprobs[0] is None and 2 in first.prompt_logprobs[1] and first.num_cached_tokens == 1
    outputs.push(TokenDelta(request_id="r", index=0, token_ids=[6], finish_reason="length"))
    last = outputs.drain()
    assert last.prompt_logprobs is None and last.finished and last.num_cached_tokens == 1
    times = last.metrics
    assert times.arrival_time <= times.first_token_time <= times.last_token_time <= times.finished_time
