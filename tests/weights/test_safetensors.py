"""safetensors folders: single files, shards with and without an index, and everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ModelError
from octavo.weights import iterate_weights
from octavo.weights.files import find_weights, gguf_models, safetensors_files, stored_dtype


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(32, 8, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(8, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(32, 8, generator=generator).half(),
        "scalar": torch.tensor(3.0),
        "ids": torch.arange(5),
    }


def read(folder: Path, **options) -> dict[str, torch.Tensor]:
    config = SimpleNamespace(path=str(folder), weights_format="safetensors")
    return {name: tensor.clone() for name, tensor in iterate_weights(config, **options)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def write_shards(folder: Path, *, index: bool, stem: str = "model") -> dict[str, torch.Tensor]:
    tensors, names = make_tensors(), list(make_tensors())
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:3], names[3:]), start=1):
        file = f"{stem}-{number:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_single_file(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    assert same(read(tmp_path), make_tensors())
    assert find_weights(tmp_path) == (str(tmp_path), "safetensors")


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path, index):
    tensors = write_shards(tmp_path, index=index)
    assert same(read(tmp_path), tensors)


def test_other_copies_of_the_model_are_left_alone(tmp_path):
    write_shards(tmp_path, index=True)
    save_file({"tok_embeddings.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    save_file({"lora": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "vae.safetensors")
    assert same(read(tmp_path), make_tensors())
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "vae.safetensors").unlink()
    assert same(read(tmp_path), make_tensors())


def test_target_dtype_spares_integers(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    fractions: list[float] = []
    got = read(tmp_path, dtype=torch.float32, progress=fractions.append)
    expected = {n: t.float() if t.is_floating_point() else t for n, t in make_tensors().items()}
    assert same(got, expected)
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)
    assert fractions[-2] < 1.0  # bytes as stored: the file's header is never counted


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(tmp_path, index):
    write_shards(tmp_path, index=index)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="1 of 3 weight shards are missing: model-00002-of-00003.safetensors"):
        read(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 400, -1])
def test_truncated_file_is_named(tmp_path, keep):
    write_shards(tmp_path, index=True)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors cannot be read.*truncated or corrupt"):
        read(tmp_path)


def test_corrupt_header_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 200)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read(tmp_path)
    assert stored_dtype(tmp_path) is None


def test_index_that_promises_too_much(tmp_path):
    write_shards(tmp_path, index=True)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="ghost.weight"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["x"]}}', "\ud800"])
def test_bad_index_is_named(tmp_path, content):
    write_shards(tmp_path, index=True)
    (tmp_path / "model.safetensors.index.json").write_text(content, "utf-8", errors="surrogatepass")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ""])
def test_index_must_not_lead_out_of_the_folder(tmp_path, name):
    write_shards(tmp_path, index=True)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="outside of the folder"):
        read(tmp_path)


def test_same_tensor_in_two_files(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(ModelError, match=r"Tensor a is both in .*x\.safetensors and in .*y\.safetensors"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "it is empty"),
        (["config.json", "pytorch_model.bin"], "Pickled PyTorch weights are not read"),
        (["adapter_model.safetensors", "adapter_config.json"], "adapter"),
        (["consolidated.safetensors"], "consolidated"),
        (["a.gguf", "b.gguf"], "several GGUF models"),
        ([f"f{i}.txt" for i in range(20)], "and 12 more"),
    ],
)
def test_folders_without_usable_weights(tmp_path, names, words):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError) as caught:
        find_weights(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_formats_are_chosen_by_request(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"x")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"x")
    assert find_weights(tmp_path) == (str(tmp_path), "safetensors")
    assert find_weights(tmp_path, "gguf") == (str(tmp_path / "m-00001-of-00002.gguf"), "gguf")
    assert gguf_models(["b/mmproj-x.gguf", "b/y-00002-of-00002.gguf", "b/y-00001-of-00002.gguf", "a.gguf"]) == [
        "a.gguf",
        "b/y-00001-of-00002.gguf",
    ]
    (tmp_path / "model.safetensors").unlink()
    assert safetensors_files(tmp_path) == []
    with pytest.raises(ModelError, match=r"no weights \(\*\.safetensors\)"):
        find_weights(tmp_path, "safetensors")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.int32, None)]
)
def test_stored_dtype(tmp_path, dtype, name):
    save_file({"n": torch.ones(3), "w": torch.ones(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == name


def test_unreadable_format_is_refused(tmp_path):
    with pytest.raises(ModelError, match="'dummy' cannot be read from a file"):
        iterate_weights(SimpleNamespace(path=str(tmp_path), weights_format="dummy"))
