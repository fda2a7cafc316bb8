"""From a checkpoint on disk to logits, as served: configuration reader, weight reader, loader and model together."""

from __future__ import annotations

import pytest
import torch

from octavo import weights
from octavo.models.loader import load_model

from .helpers import PagedRunner, tiny_transformers_model

if not hasattr(weights, "iterate_weights"):
    pytest.skip("the checkpoint readers are not built in yet", allow_module_level=True)

TOKENS = torch.randint(0, 131, (30,), generator=torch.Generator().manual_seed(8)).tolist()

CASES = {
    "llama3-tied": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2-upper-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-yarn": (
        "Qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_gives_its_logits(case: str, tmp_path) -> None:
    from octavo.models.config import read_model_config

    family, changes = CASES[case]
    hf_model = tiny_transformers_model(family, **changes)
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")
    seen: list[float] = []
    model = load_model(read_model_config(str(tmp_path)), dtype=torch.float32, device="cpu", progress=seen.append)
    assert seen[-1] == 1.0
    with torch.no_grad():
        expected = hf_model(torch.tensor([TOKENS])).logits[0]
    logits = PagedRunner(model).step([("s", TOKENS)])[0]
    assert (logits - expected).abs().max() / expected.abs().max() < 1e-5


def test_dummy_weights_are_a_function_of_the_seed(tmp_path) -> None:
    from octavo.models.config import read_model_config

    tiny_transformers_model("Llama").save_pretrained(tmp_path)
    config = read_model_config(str(tmp_path))

    def logits(seed: int) -> torch.Tensor:
        model = load_model(config, dtype=torch.float32, device="cpu", load_format="dummy", seed=seed)
        return PagedRunner(model).step([("s", TOKENS)])[0]

    first = logits(1)
    assert first.isfinite().all()
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))
