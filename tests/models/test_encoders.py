"""BERT's family against transformers: tiny random models out of files, batches of random lengths; and what the readers refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError
from octavo.models.bert import PackedBatch
from octavo.models.config import ModelConfig, read_model_config
from octavo.models.loader import load_model
from octavo.models.pooling import PoolingConfig, read_pooling

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 70,
}
CASES = {
    "bert": ("Bert", "Model", {}),
    "bert-masked-lm": ("Bert", "ForMaskedLM", {}),
    "bert-tanh-gelu": ("Bert", "Model", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": ("Roberta", "Model", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta-masked-lm": ("XLMRoberta", "ForMaskedLM", {"type_vocab_size": 1, "pad_token_id": 2}),
}


def make_encoder(folder: Path, family: str = "Bert", head: str = "Model", seed: int = 0, **changes: Any) -> Any:
    """A transformers model whose every parameter is random, saved into ``folder``; returns its encoder in float32."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, "attn_implementation": "eager", **changes})
    model = getattr(transformers, f"{family}{head}")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "LayerNorm.weight" in name else noise * 0.3
    model.save_pretrained(folder)
    return model.base_model


def run_ours(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """Each text's states [tokens, H], out of one packed step."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    batch = PackedBatch([len(texts[i]) for i in order], torch.device("cpu"))
    tokens = torch.tensor([t for i in order for t in texts[i]] + [0, 0, 0])  # padding behind the tokens
    positions = torch.cat([torch.from_numpy(batch.positions), torch.zeros(3, dtype=torch.int64)])
    with torch.no_grad():
        states = model(tokens, positions, batch)
    assert torch.isfinite(states).all()
    parts = states[: batch.num_tokens].split([len(texts[i]) for i in order])
    found: list[Any] = [None] * len(texts)
    for i, part in zip(order, parts, strict=True):
        found[i] = part
    return found


def load(folder: Path) -> tuple[Any, ModelConfig]:
    config = read_model_config(folder)
    return load_model(config, dtype=torch.float32, device="cpu"), config


@pytest.mark.parametrize("case", CASES)
def test_states_equal_transformers(case: str, tmp_path: Path) -> None:
    family, head, changes = CASES[case]
    theirs = make_encoder(tmp_path, family, head, **changes)
    ours, config = load(tmp_path)
    assert config.encoder and config.max_position == 70 - config.position_offset
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 1, 2, 3, 17, 18, 19, 20, 33, 34, config.max_position, config.max_position]
    texts = [torch.randint(5, 101, (n,), generator=generator).tolist() for n in lengths]
    for text, states in zip(texts, run_ours(ours, texts), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-4)


def test_a_text_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    ours, _ = load(tmp_path)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, 101, (n,), generator=generator).tolist() for n in torch.randint(1, 70, (60,), generator=generator).tolist()]
    for text, states in zip(texts, run_ours(ours, texts), strict=True):
        torch.testing.assert_close(states, run_ours(ours, [text])[0], atol=2e-5, rtol=1e-4)


def test_groups_are_bounded() -> None:
    """Every token is in one group, padding is bounded by the ratio, and a group by its size."""
    lengths = sorted(torch.randint(1, 300, (200,), generator=torch.Generator().manual_seed(2)).tolist())
    batch = PackedBatch(lengths, torch.device("cpu"), most_padded=2000)
    assert sum(g.num_tokens for g in batch.groups) == batch.num_tokens == sum(lengths)
    assert [g.first for g in batch.groups] == [sum(g.num_tokens for g in batch.groups[:i]) for i in range(len(batch.groups))]
    for group in batch.groups:
        assert group.size * group.length <= 2000
        assert group.num_tokens >= group.size * min(0.75 * group.length, group.length - 8) - 1


def test_old_names_of_norms(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs = make_encoder(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {next((n.replace(a, b) for a, b in old.items() if n.endswith(a)), n): t for n, t in load_file(file).items()}
    save_file({f"bert.{n}": t for n, t in renamed.items()}, file)
    ours, _ = load(tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([[7, 8, 9]])).last_hidden_state[0]
    torch.testing.assert_close(run_ours(ours, [[7, 8, 9]])[0], expected, atol=2e-5, rtol=1e-4)


def test_dummy_weights(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_model_config(tmp_path, "dummy")
    model = load_model(config, dtype=torch.float32, device="cpu", load_format="dummy")
    assert torch.isfinite(run_ours(model, [[1, 2, 3]])[0]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "only encoders"),
        ({"hidden_act": "swish"}, "hidden_act"),
        ({"hidden_size": 50}, "does not divide"),
        ({"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification is not supported.*BertModel"),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 1}, "max_position_embeddings"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_encoder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def write_modules(folder: Path, pooling: dict[str, Any], *types: str, max_length: int | None = None) -> None:
    names = ["Transformer", "Pooling", *types]
    prefix = "sentence_transformers.models."
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{n}" if i else "", "type": prefix + n} for i, n in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if max_length:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length, "do_lower_case": False}))


def test_what_sentence_transformers_files_say(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    write_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, max_length=77)
    assert read_pooling(tmp_path) == PoolingConfig("cls", False, 77)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True, "word_embedding_dimension": 8, "include_prompt": True}, "Normalize")
    assert read_pooling(tmp_path) == PoolingConfig("last", True, 77)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    assert read_pooling(tmp_path) == PoolingConfig("mean", False, 77)


@pytest.mark.parametrize(
    ("pooling", "types", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens is not supported"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "not supported"),
        ({"pooling_mode_mean_tokens": False}, (), "nothing is not supported"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "module Dense is not supported"),
    ],
)
def test_poolings_that_are_refused(pooling: dict[str, Any], types: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_modules(tmp_path, pooling, *types)
    with pytest.raises(ModelError, match=message):
        read_pooling(tmp_path)


def test_paths_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
    with pytest.raises(ModelError, match="not the name of a folder"):
        read_pooling(tmp_path)
