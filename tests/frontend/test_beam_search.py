"""Beam search against transformers', and its rules on their own against a search that enumerates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams
from octavo.errors import RequestError
from octavo.frontend.beam_search import BeamSearch
from octavo.frontend.outputs import Logprob
from tests.e2e.demo import demo_model_path, text_prompts
from tests.models.helpers import tiny_transformers_model

EOS = list(range(3, 131, 8))
PROMPTS = [[5, 9, 40, 22], [100, 2, 2, 64, 91, 8, 15, 16, 23, 42, 77, 1, 30, 31, 32, 33, 34, 35], [11]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    folder = tmp_path_factory.mktemp("beams")
    hf = tiny_transformers_model("Llama", eos_token_id=EOS)
    hf.save_pretrained(folder)
    llm = LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True, kv_cache_memory=2**22, max_num_seqs=16)
    yield hf, llm
    llm.shutdown()


def by_transformers(hf: Any, prompt: list[int], width: int, max_tokens: int, eos: list[int] | None, **settings: Any) -> list[list[int]]:
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=eos,
            pad_token_id=0 if eos is None else eos[0],
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    found = []
    for row in out.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in (eos or ())), len(row))
        found.append(row[:end])
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_equals_transformers(models: tuple[Any, LLM], early_stopping: Any, length_penalty: float) -> None:
    hf, llm = models
    reasons: set[str | None] = set()
    for width, max_tokens in ((1, 12), (2, 20), (4, 24), (5, 1)):
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping, length_penalty=length_penalty)
        outputs = llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = by_transformers(hf, prompt, width, max_tokens, EOS, length_penalty=length_penalty, early_stopping=early_stopping)
            if width > 1 or early_stopping is True:  # transformers' generate(num_beams=1) is its greedy search
                assert [o.token_ids for o in output.outputs] == expected
            assert [o.finish_reason for o in output.outputs] == ["stop" if o.token_ids[-1] in EOS else "length" for o in output.outputs]
            reasons |= {o.finish_reason for o in output.outputs}
    assert length_penalty > 2 or "stop" in reasons  # where length is not all that counts, some end by themselves


def test_ignore_eos_and_n(models: tuple[Any, LLM]) -> None:
    hf, llm = models
    params = BeamSearchParams(beam_width=3, n=2, max_tokens=15, ignore_eos=True)
    output = llm.beam_search({"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False)[0]
    assert [o.token_ids for o in output.outputs] == by_transformers(hf, PROMPTS[0], 3, 15, None)[:2]
    assert {o.finish_reason for o in output.outputs} == {"length"}


def test_the_demo_model_equals_transformers() -> None:
    """Real text, real vocabulary: 49,152 tokens, texts and log-probabilities of the sequences found."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=3, tie_word_embeddings=True, rms_norm_eps=1e-5, max_position_embeddings=8192, rope_theta=100000.0
    )
    hf = transformers.LlamaForCausalLM(config).eval()
    hf.load_state_dict(load_gguf_checkpoint(demo_model_path(), return_tensors=True, model_to_load=hf)["tensors"], strict=False)
    hf.tie_weights()
    llm = LLM(demo_model_path(), dtype="float32", device="cpu", max_model_len=256, kv_cache_memory=64 * 2**20)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(text)[:24] for text in text_prompts(3, seed=5)]
    outputs = llm.beam_search([{"prompt_token_ids": p} for p in prompts], BeamSearchParams(beam_width=3, max_tokens=12, logprobs=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = by_transformers(hf, prompt, 3, 12, list(llm.model_config.eos_token_ids))
        assert [o.token_ids for o in output.outputs] == expected
        for o in output.outputs:
            assert o.text == tokenizer.decode(o.token_ids, skip_special_tokens=True)
            chosen = [position[token].logprob for token, position in zip(o.token_ids, o.logprobs, strict=True)]
            assert math.isclose(sum(chosen), o.cumulative_logprob, abs_tol=1e-4)
            assert all(2 <= len(position) <= 3 for position in o.logprobs)
    llm.shutdown()


def test_a_wide_search_finds_the_best_there_is() -> None:
    """A beam as wide as all prefixes (2 ** 4 that go on) leaves none out, so it must find what looking at every sequence finds."""
    vocab, length, eos = 3, 5, 0

    def position(prefix: tuple[int, ...]) -> dict[int, Logprob]:
        weights = [1 + (hash((prefix, token)) % 97) for token in range(vocab)]
        return {token: Logprob(math.log(w / sum(weights))) for token, w in enumerate(weights)}

    scores: dict[tuple[int, ...], float] = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(range(vocab), repeat=size):
            if eos in tokens[:-1] or (tokens[-1] != eos and size < length):
                continue
            scores[tokens] = sum(position(tokens[:i])[token].logprob for i, token in enumerate(tokens)) / size
    best = sorted(scores, key=lambda tokens: -scores[tokens])
    params = BeamSearchParams(beam_width=32, max_tokens=length, early_stopping="never")
    search = BeamSearch([1], params, max_tokens=length, eos_token_ids=(eos,), vocab_size=vocab)
    while not search.done:
        search.advance([position(tuple(beam.token_ids)) for beam in search.beams])
    assert [tuple(o.token_ids) for o in search.outputs(None)] == best[:32]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 1000}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 1000.0}, "length_penalty"),
        ({"temperature": 0.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -2}, "logprobs"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        BeamSearchParams(**fields)
    assert error.value.param == param


def test_a_prompt_that_cannot_be_served_leaves_nothing_behind(models: tuple[Any, LLM]) -> None:
    _, llm = models
    with pytest.raises(RequestError, match="vocabulary"):
        llm.beam_search([[1, 2], [131]], use_tqdm=False)
    assert len(llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2), use_tqdm=False)[0].outputs) == 2
