"""``LLM`` on a tiny model: shapes of input, refusals that leave nothing behind, ends of sequences, interruptions."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError
from tests.frontend.thresholds import thresholds_seen
from tests.tiny_model import EOS, VOCAB_SIZE, make_tiny_model

LENGTH = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(folder, load_format="dummy", dtype="float32", device="cpu", kv_cache_memory=2**21, max_num_seqs=8)


def ids(llm: LLM, prompt: Any, params: SamplingParams = LENGTH) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_prompts_of_every_shape(llm: LLM) -> None:
    expected = ids(llm, "abc")
    tokens = llm.get_tokenizer().encode("abc")
    for prompt in (["abc"], tokens, [tokens], {"prompt": "abc"}, [{"prompt_token_ids": tokens}], {"prompt_token_ids": np.array(tokens)}):
        assert ids(llm, prompt) == expected
    assert llm.generate([], LENGTH, use_tqdm=False) == []
    assert [o.outputs[0].token_ids for o in llm.generate(["x", "abc"], [LENGTH, LENGTH], use_tqdm=False)][1] == expected


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        ([], [LENGTH], "0 prompts came with 1"),
        ("a", {"temperature": 1}, "must be SamplingParams"),
        ("a", "greedy", "must be SamplingParams"),
        (5, LENGTH, "got int"),
        ([None], LENGTH, "got NoneType"),
        ({"prompt_token_ids": ["a"]}, LENGTH, "list of integers"),
        ({"prompt_token_ids": [1.5]}, LENGTH, "list of integers"),
        ({"prompt_token_ids": 3}, LENGTH, "list of integers"),
        ({"prompt_token_ids": [True]}, LENGTH, "list of integers"),
        ({"text": "a"}, LENGTH, "not 'text'"),
        ({"prompt_token_ids": []}, LENGTH, "empty"),
        ([[VOCAB_SIZE]], LENGTH, "vocabulary"),
        (["a" * 512], LENGTH, "context length"),
        (["a"], SamplingParams(n=9), "max-num-seqs"),
        (["a"], SamplingParams(n=10**12), "max-num-seqs"),
        (["a"], SamplingParams(stop_token_ids=[VOCAB_SIZE]), "vocabulary"),
    ],
)
def test_refusals_leave_nothing_behind(llm: LLM, prompts: Any, params: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("temperature", "'temperature' is a sampling parameter: give it to SamplingParams"),
        ("max_tokens", "'max_tokens' is a sampling parameter"),
        ("enable_lora", "'enable_lora' is an option of vLLM that Octavo does not have. Serve a merged checkpoint instead."),
        ("max_model_length", "Did you mean 'max_model_len'"),
    ],
)
def test_unknown_options_are_refused_before_anything_is_loaded(name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM("/no/such/model", **{name: 1})


def test_what_would_be_ignored_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="scheduling_policy"):
        llm.generate("a", LENGTH, priority=[1], use_tqdm=False)
    llm.generate("a", LENGTH, priority=[0], use_tqdm=False)
    talk = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="tools"):
        llm.chat(talk, LENGTH, tools=[{"type": "function", "function": {"name": "f"}}], use_tqdm=False)
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0]['content'] }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert llm.chat(talk, LENGTH, tools=tools, chat_template=template, use_tqdm=False)[0].prompt.endswith("]a")
    for messages in (None, "hi", [], [[]], [5], [{"role": "user"}], {"role": "user", "content": "a"}):
        with pytest.raises(RequestError):
            llm.chat(messages, LENGTH, use_tqdm=False)  # type: ignore[arg-type]


def test_a_refusal_in_the_middle_of_a_batch_does_not_break_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SamplingParams(max_tokens=0)
    add = llm.engine.add_request

    def refuse_second(request: Any) -> None:
        if request.prompt_token_ids == llm.get_tokenizer().encode("second"):
            raise RequestError("no")
        add(request)

    monkeypatch.setattr(llm.engine, "add_request", refuse_second)
    with pytest.raises(RequestError, match="no"):
        llm.generate(["first", "second"], [nothing, LENGTH], use_tqdm=False)
    assert len(ids(llm, "third")) == 8


def test_parameters_changed_after_they_were_made_are_checked_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    params.stop = "xyz"  # becomes a list, as in the constructor
    llm.generate("a", params, use_tqdm=False)
    params.temperature = "hot"  # type: ignore[assignment]
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("place", ["submit", "collect", "schedule"])
def test_ctrl_c_in_a_step_leaves_an_engine_that_works(llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(llm, "the same prompt, long enough for a full block")
    owner = llm.engine.scheduler if place == "schedule" else llm.executor
    original, calls = getattr(owner, place), []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the same prompt, long enough for a full block", "another"], LENGTH, use_tqdm=False)
    assert not llm.engine.has_work()
    assert ids(llm, "the same prompt, long enough for a full block") == expected
    assert llm.engine.stats().kv_cache_usage == 0


def test_max_tokens_zero_and_one(llm: LLM) -> None:
    for n in (1, 3):
        out = llm.generate("abcd", SamplingParams(max_tokens=0, n=n), use_tqdm=False)[0]
        assert [(o.index, o.text, o.token_ids, o.finish_reason) for o in out.outputs] == [(i, "", [], "length") for i in range(n)]
        out = llm.generate("abcd", SamplingParams(max_tokens=0, n=n, prompt_logprobs=2, logprobs=1), use_tqdm=False)[0]
        assert out.prompt_logprobs[0] is None and all(p for p in out.prompt_logprobs[1:]) and len(out.prompt_logprobs) == 4
        assert all(o.logprobs == [] for o in out.outputs)
    out = llm.generate("a", SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)[0]
    assert out.prompt_logprobs == [None]
    assert len(ids(llm, "abcd", SamplingParams(max_tokens=1, ignore_eos=True))) == 1
    full = llm.generate([[1] * 512], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)[0]
    assert len(full.prompt_logprobs) == 512


def test_the_context_can_be_filled_to_its_last_token(llm: LLM) -> None:
    out = llm.generate([[1] * 500], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (12, "length")


def test_the_end_of_a_prompt_is_kept(llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode("abcdefgh")
    for keep in (1, 3, len(tokens), 2000):
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, truncate_prompt_tokens=keep)
        output = llm.generate("abcdefgh", params, use_tqdm=False)[0]
        assert output.prompt == "abcdefgh" and output.prompt_token_ids == tokens[-keep:]
        assert output.outputs[0].token_ids == ids(llm, {"prompt_token_ids": tokens[-keep:]})


def test_ends(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    drawn = ids(llm, "abc", greedy)
    third = drawn[2]
    at = drawn.index(third)

    def run(**changes: Any) -> Any:
        params = SamplingParams(max_tokens=8, temperature=0, **changes)
        return llm.generate("abc", params, use_tqdm=False)[0].outputs[0]

    out = run(stop_token_ids=[third], ignore_eos=True)
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (drawn[: at + 1], "stop", third)
    out = run(logit_bias={EOS: 100})
    assert (out.token_ids, out.text, out.finish_reason, out.stop_reason) == ([EOS], "", "stop", None)
    out = run(logit_bias={EOS: 100}, include_stop_str_in_output=True, skip_special_tokens=False)
    assert (out.token_ids, out.text) == ([EOS], "<|im_end|>")
    out = run(logit_bias={EOS: 100}, min_tokens=3)
    assert len(out.token_ids) >= 3 and EOS not in out.token_ids[:3]
    out = run(logit_bias={EOS: 100}, ignore_eos=True, skip_special_tokens=False)
    assert (out.token_ids, out.text, out.finish_reason) == ([EOS] * 8, "<|im_end|>" * 8, "length")
    out = run(detokenize=False, ignore_eos=True, logprobs=1)
    assert out.text == "" and out.token_ids == drawn and len(out.logprobs) == 8


@pytest.mark.parametrize(
    "field",
    "stop_token_ids allowed_token_ids logit_bias ignore_eos detokenize skip_special_tokens seed n stop bad_words".split(),
)
@pytest.mark.parametrize("value", [5.5, "x\ud800", b"x", object(), [None], [[1]], {"a": 1}, {1: "x"}, {1: True}, {1: float("nan")}, True])
def test_any_value_is_served_or_refused(llm: LLM, field: str, value: Any) -> None:
    try:
        llm.generate("a", SamplingParams(max_tokens=2, **{field: value}), use_tqdm=False)
    except RequestError as error:
        assert field in str(error)
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-320},
        {"temperature": 1e-4},
        {"temperature": 1.7e308},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"logprobs": 10**9},
        {"prompt_logprobs": 10**9},
        {"logprobs": -1},
        {"min_tokens": 10**9, "max_tokens": None},
        {"allowed_token_ids": [5], "logit_bias": {5: -100}},
        {"allowed_token_ids": [EOS, 5], "min_tokens": 4},
        {"bad_words": ["a", " ", "\x00", "🙂"]},
    ],
)
def test_extreme_values_are_served(llm: LLM, changes: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **changes})
    for out in llm.generate(["ab", "c"], params, use_tqdm=False):
        assert out.outputs[0].finish_reason == "length"
        assert all(0 <= token < VOCAB_SIZE for token in out.outputs[0].token_ids)


def test_preemption_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", max_position=256)
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "max_model_len": 128}
    prompts = [f"prompt number {i} " * 3 for i in range(12)]
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, ignore_eos=True, n=2, logprobs=1, frequency_penalty=0.3)
    roomy = LLM(folder, kv_cache_memory=2**24, max_num_seqs=32, **options).generate(prompts, params, use_tqdm=False)
    tight = LLM(folder, num_gpu_blocks_override=12, max_num_seqs=8, max_num_batched_tokens=24, **options)
    results = tight.generate(prompts, params, use_tqdm=False)
    assert tight.engine.stats().num_preemptions > 0
    for a, b in zip(roomy, results, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert all(len(o.logprobs) == 60 for o in b.outputs)
    assert tight.engine.stats().kv_cache_usage == 0


@pytest.mark.parametrize("frozen", [False, True], ids=["", "with frozen objects of the caller's"])
def test_while_a_batch_runs_collections_are_rare_and_afterwards_as_before(llm: LLM, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), thresholds_seen(llm.engine, monkeypatch)
    if frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        llm.generate("a b", SamplingParams(max_tokens=2), use_tqdm=False)
        assert set(seen) == {(20_000, 20, 50)} and len(seen) >= 3
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() > count // 2 if frozen else gc.get_freeze_count() == 0  # some were freed meanwhile
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("chosen", [(0, 10, 10), (90_000, 30, 10)])
def test_a_caller_who_collects_less_often_is_left_alone(llm: LLM, chosen: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    before, step, seen = gc.get_threshold(), llm.engine.step, []
    monkeypatch.setattr(llm.engine, "step", lambda: (seen.append(gc.get_threshold()[:2]), step())[1])
    gc.set_threshold(*chosen)
    try:
        llm.generate("a b", SamplingParams(max_tokens=2), use_tqdm=False)
        assert set(seen) == {chosen[:2]}
        assert gc.get_threshold() == chosen
    finally:
        gc.set_threshold(*before)


def test_threads_that_share_an_llm_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, step, results = [ids(llm, "abc"), ids(llm, "x")], llm.engine.step, {}
    second = threading.Thread(target=lambda: results.update(x=ids(llm, "x")))

    def stepped() -> Any:
        if second.ident is None:  # in the middle of the first one's batch
            second.start()
            second.join(0.2)
        return step()

    monkeypatch.setattr(llm.engine, "step", stepped)
    first = ids(llm, "abc")
    second.join(60)
    assert [first, results["x"]] == expected


@pytest.mark.parametrize(("asked", "warned"), [(None, 0), (48, 0), (64, 1)])
def test_fewer_blocks_than_the_length_that_was_asked_for_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: int | None, warned: int
) -> None:
    folder = str(make_tiny_model(tmp_path / "tiny"))
    llm = LLM(folder, load_format="dummy", dtype="float32", device="cpu", num_gpu_blocks_override=3, max_model_len=asked, max_num_seqs=2)
    assert llm.executor.max_model_len == 48
    assert caplog.text.count("room for 48 of the 64 tokens") == warned
    llm.shutdown()
