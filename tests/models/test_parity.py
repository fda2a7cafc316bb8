"""Our models give transformers' logits: in one step, in chunks, token by token, and batched with other sequences."""

from __future__ import annotations

import pytest
import torch

from .helpers import PagedRunner, load_like, tiny_transformers_model

LENGTH = 40

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
}

CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-wide-heads": ("Llama", {"num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 2}),
    "llama-mqa-gelu": ("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama-gelu-tanh": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    **{f"llama-{name}": ("Llama", {"rope_parameters": {"rope_theta": 10000.0, **rope}}) for name, rope in ROPES.items()},
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-upper-window-tied": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias-yarn": ("Qwen3", {"attention_bias": True, "rope_parameters": {"rope_theta": 1e6, **ROPES["yarn"]}}),
}


def random_tokens(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def truth(hf_model, tokens: list[int]) -> torch.Tensor:
    return hf_model(torch.tensor([tokens])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # float32 sums in another order: the error is relative to the size of the logits, not to each one
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_logits_however_the_prompt_is_cut(case: str) -> None:
    family, changes = CASES[case]
    hf_model = tiny_transformers_model(family, **changes)
    tokens = random_tokens(LENGTH)
    expected = truth(hf_model, tokens)
    model = load_like(hf_model)

    assert_close(PagedRunner(model).step([("whole", tokens)])[0], expected)

    runner = PagedRunner(model, seed=1)
    chunks = [tokens[:13], tokens[13:14], tokens[14:33], tokens[33:]]
    assert_close(torch.cat([runner.step([("chunked", chunk)])[0] for chunk in chunks]), expected)

    runner = PagedRunner(model, block_size=8, seed=2)
    assert_close(torch.cat([runner.step([("single", [token])])[0] for token in tokens]), expected)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_greedy_tokens_in_a_batch(family: str) -> None:
    """Three sequences of unlike lengths, the last joining late, decode together what transformers decodes for each alone."""
    hf_model = tiny_transformers_model(family, seed=3, **({"sliding_window": 11} if family == "Mistral" else {}))
    runner = PagedRunner(load_like(hf_model), seed=3)
    prompts = {"a": random_tokens(5, 4), "b": random_tokens(19, 5), "c": random_tokens(12, 6)}
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    pending = {"a": prompts["a"], "b": prompts["b"]}
    for step in range(16):
        if step == 3:
            pending["c"] = prompts["c"]
        work = sorted(pending.items(), key=lambda item: len(item[1]) != 1)
        for (name, _), logits in zip(work, runner.step(work), strict=True):
            texts[name].append(int(logits[-1].argmax()))
            pending[name] = texts[name][-1:]
    for name, text in texts.items():
        start = len(prompts[name])
        # teacher forcing: if each token is the argmax after all before it, greedy decoding gives this text
        assert text[start:] == truth(hf_model, text)[start - 1 : -1].argmax(-1).tolist(), name


@pytest.mark.parametrize(("served", "length"), [(32, 30), (64, 50)])
def test_longrope_by_served_length(served: int, length: int) -> None:
    """Short factors within the original context, long ones when more is served."""
    factors = {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.3 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, **factors}
    hf_model = tiny_transformers_model("Llama", rope_parameters=rope)
    tokens = random_tokens(length)
    model = load_like(hf_model, max_position=served)
    assert_close(PagedRunner(model).step([("s", tokens)])[0], truth(hf_model, tokens))


@pytest.mark.parametrize("length", [24, 48])
def test_dynamic_rope_at_the_served_length(length: int) -> None:
    """transformers picks the base by the sequence's length, we by the table's: they agree where the two are equal."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    hf_model = tiny_transformers_model("Llama", rope_parameters=rope, max_position_embeddings=24)
    tokens = random_tokens(length)
    model = load_like(hf_model, max_position=length)
    assert_close(PagedRunner(model).step([("s", tokens)])[0], truth(hf_model, tokens))


def test_bfloat16_follows_float32() -> None:
    """Half precision keeps to the float32 logits within its own rounding (8 bits of mantissa, a few layers of it)."""
    hf_model = tiny_transformers_model("Llama")
    tokens = random_tokens(LENGTH)
    model = load_like(hf_model, dtype=torch.bfloat16)
    logits = PagedRunner(model, dtype=torch.bfloat16).step([("s", tokens)])[0]
    expected = truth(hf_model, tokens)
    assert (logits - expected).norm() / expected.norm() < 0.02
