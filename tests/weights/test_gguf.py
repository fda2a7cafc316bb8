"""GGUF: the parser against the gguf package's reader, dequantization and tensor names against the package and transformers."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES

from octavo.errors import ModelError
from octavo.models.config import read_model_config
from octavo.models.hub import resolve_model
from octavo.weights import iterate_weights, rope_factors
from octavo.weights.gguf_dequant import dequantize
from octavo.weights.gguf_file import TENSOR_TYPES, GgufFile
from octavo.weights.gguf_tensors import hf_name

sys.path.insert(0, str(Path(__file__).parent))
from gguf_samples import pack, tiny_metadata, tiny_tensors, write_gguf

QUANTIZED = [name for name, elements, _ in TENSOR_TYPES.values() if elements > 1]


@pytest.fixture(scope="module")
def demo_path() -> str:
    return resolve_model(None)


def write_tiny(path: Path, architecture: str, **more) -> Path:
    return write_gguf(path, architecture, tiny_metadata(**more), tiny_tensors(architecture, np.random.default_rng(1)))


# ---------------------------------------------------------------------------------------------------------------------
# Parser


def test_type_table_is_the_packages():
    for number, (name, elements, size) in TENSOR_TYPES.items():
        assert GGMLQuantizationType(number).name == name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (elements, size)


def test_parser_equals_package_reader_on_the_demo_model(demo_path):
    ours, theirs = GgufFile(demo_path), GGUFReader(demo_path)
    assert ours.version == 3
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours[key] == field.contents(), key
    assert len(ours) == sum(not key.startswith("GGUF.") for key in theirs.fields)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for theirs_t in theirs.tensors:
        t = ours.tensors[theirs_t.name]
        expected = (tuple(theirs_t.shape[::-1]), theirs_t.tensor_type.name, theirs_t.data_offset, theirs_t.n_bytes)
        assert (t.shape, t.type_name, t.offset, t.num_bytes) == expected


def test_metadata_of_every_type(tmp_path):
    values = {
        "a.bool": True,
        "a.text": "grüße 🦙",
        "a.int": 7,
        "a.float": 0.5,
        "a.ints": [1, -2, 3],
        "a.floats": [0.5, 1.5],
        "a.bools": [True, False],
        "a.texts": ["x", "", "ÿ"],
    }
    file = GgufFile(write_gguf(tmp_path / "m.gguf", "llama", values, {"t": (np.ones(4), "F32")}))
    assert {key: file[key] for key in values} == values
    assert file.array_length("a.texts") == 3
    assert file.array_length("a.int") is None
    assert "a.texts" not in file.small_metadata(limit=2)
    assert file.small_metadata(limit=2)["a.floats"] == [0.5, 1.5]
    assert file.read_float32("t") == [1.0] * 4
    assert file.read_float32("absent") is None


def test_parser_needs_neither_torch_nor_numpy(demo_path):
    code = f"""
import sys
from octavo.models.config import read_model_config
assert read_model_config({demo_path!r}).num_layers == 30
assert not {{"torch", "numpy", "gguf", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_truncation_is_a_model_error(tmp_path):
    content = write_tiny(tmp_path / "m.gguf", "llama").read_bytes()
    broken = tmp_path / "broken.gguf"
    # cuts all through the header, and some through the data
    for length in [*range(0, 2500, 5), *range(2500, len(content) - 1, 9973), len(content) - 33]:
        broken.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"broken\.gguf"):
            GgufFile(broken)


def test_random_damage_never_escapes_as_another_error(tmp_path):
    content = write_tiny(tmp_path / "m.gguf", "llama").read_bytes()
    rng = np.random.default_rng(2)
    broken = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for position in rng.integers(0, 2500, 3):
            damaged[position] = rng.integers(0, 256)
        broken.write_bytes(damaged)
        try:
            list(iterate_weights(read_model_config(broken)))
        except ModelError as error:
            assert "broken.gguf" in str(error)
            refused += 1
    assert refused > 25


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"not a model at all", "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported; supported: 2, 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "'k' has unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 99, 0), "tensor t has unknown type number 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 2, 0), "does not divide into Q4_0 blocks of 32"),
    ],
)
def test_bad_files_are_named(tmp_path, content, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.gguf") as caught:
        GgufFile(path)
    assert words in str(caught.value)


def test_split_model(tmp_path):
    tensors = tiny_tensors("llama", np.random.default_rng(1))
    whole = write_gguf(tmp_path / "whole.gguf", "llama", tiny_metadata(), tensors)
    names = list(tensors)
    for number, part in enumerate((names[:5], names[5:12], names[12:]), start=1):
        metadata = tiny_metadata() if number == 1 else {}
        write_gguf(tmp_path / f"m-{number:05}-of-00003.gguf", "llama", metadata, {name: tensors[name] for name in part})
    config = read_model_config(tmp_path / "m-00002-of-00003.gguf")
    assert config.path.endswith("m-00001-of-00003.gguf")
    expected = dict(iterate_weights(read_model_config(whole)))
    got = dict(iterate_weights(config))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="m-00003-of-00003.gguf does not exist"):
        read_model_config(tmp_path / "m-00001-of-00003.gguf")


# ---------------------------------------------------------------------------------------------------------------------
# Dequantization


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_dequantize_equals_the_package(type_name, dtype, monkeypatch):
    monkeypatch.setattr("octavo.weights.gguf_dequant._CHUNK_ELEMENTS", 1024)  # several chunks, and a rest
    rng = np.random.default_rng(len(type_name))
    values = rng.standard_normal((7, 768), dtype=np.float32) * 3
    for packed in (pack(values, type_name, rng), random_blocks(values.shape, type_name, rng)):
        expected = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType[type_name]))
        assert expected.isfinite().all()
        got = dequantize(torch.from_numpy(packed), type_name, (7, 768), dtype)
        assert got.dtype == dtype
        assert torch.equal(got, expected.to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_dequantize_on_a_gpu_equals_the_cpu(type_name):
    rng = np.random.default_rng(3)
    raw = torch.from_numpy(random_blocks((7, 768), type_name, rng))
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize(raw.cuda(), type_name, (7, 768), dtype)
        assert got.is_cuda
        assert torch.equal(got.cpu(), dequantize(raw, type_name, (7, 768), dtype))


def random_blocks(shape: tuple[int, ...], type_name: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes that no quantizer would choose: every bit pattern of scales and values, but no infinite scale."""
    data = rng.integers(0, 256, quants.quant_shape_to_byte_shape(shape, GGMLQuantizationType[type_name]), dtype=np.uint8)
    if type_name == "MXFP4":
        data[:, ::17] &= 0x7F  # the scale is a power of two: keep the largest ones away
    data[..., 1::2] &= 0xBF
    return data


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("type_name", "stored"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types_keep_or_change_theirs(type_name, stored, dtype):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(stored)
    got = dequantize(values.view(torch.uint8), type_name, (3, 5), dtype)
    assert got.dtype == (dtype or stored)
    assert torch.equal(got, values.to(got.dtype))
    got.zero_()  # owns its memory
    assert values.count_nonzero() == 15


# ---------------------------------------------------------------------------------------------------------------------
# Names and row order, with transformers' own GGUF loader as the truth


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_small_models_equal_transformers(tmp_path, architecture):
    path = write_tiny(tmp_path / "m.gguf", architecture)
    check_against_transformers(path)


def test_demo_model_equals_transformers(demo_path):
    from transformers import LlamaConfig

    # SmolLM2-135M's published configuration: transformers would take seconds more to read it out of the file
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    theirs = LlamaConfig(**sizes, **heads, max_position_embeddings=8192, rope_theta=100000.0)
    check_against_transformers(Path(demo_path), theirs)


def check_against_transformers(path: Path, theirs=None) -> None:
    """Every tensor equal, bit by bit, and none missing, next to the state dict that transformers makes of the same file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = theirs or AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    # what from_pretrained(gguf_file=...) calls, without the accelerate package that it asks for
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    config = read_model_config(path)
    names = set(model.state_dict()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert set(expected) == names
    seen = set()
    for name, tensor in iterate_weights(config, dtype=torch.float32):
        assert torch.equal(tensor, expected[name]), name
        seen.add(name)
    assert seen == names
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (config.vocab_size, config.num_layers) == (theirs.vocab_size, theirs.num_hidden_layers)
    assert config.norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.max_position == theirs.max_position_embeddings
    assert config.tie_word_embeddings == theirs.tie_word_embeddings


def test_llama_biases_are_reordered_too(tmp_path):
    rows = np.arange(64, dtype=np.float32)
    interleaved = rows.reshape(4, 2, 8).swapaxes(1, 2).reshape(64)  # what the converter does to each of 4 heads of 16
    tensors = {"blk.0.attn_q.bias": (interleaved, "F32"), "blk.0.attn_v.bias": (rows[:32], "F32")}
    got = dict(iterate_weights(read_model_config(write_gguf(tmp_path / "m.gguf", "llama", tiny_metadata(), tensors))))
    assert got["model.layers.0.self_attn.q_proj.bias"].tolist() == rows.tolist()
    assert got["model.layers.0.self_attn.v_proj.bias"].tolist() == rows[:32].tolist()


def test_rope_factors_are_no_weights_but_reachable(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_metadata(), {"rope_freqs.weight": (factors, "F32"), "output_norm.weight": (np.ones(64), "F32")}
    )
    config = read_model_config(path)
    assert [name for name, _ in iterate_weights(config)] == ["model.norm.weight"]
    assert rope_factors(config).tolist() == factors.tolist()
    assert rope_factors(read_model_config(write_tiny(tmp_path / "n.gguf", "llama"))) is None


def test_unknown_tensors_are_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_metadata(), {"blk.0.ffn_gate_inp.weight": (np.ones((4, 64)), "F32")})
    with pytest.raises(ModelError, match="blk.0.ffn_gate_inp.weight"):
        next(iterate_weights(read_model_config(path)))
    assert hf_name("blk.0.attn_q.weight.more") is None
    assert hf_name("elsewhere.weight") is None


def test_rows_that_heads_cannot_share(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_metadata(), {"blk.0.attn_q.weight": (np.ones((63, 64)), "F32")})
    with pytest.raises(ModelError, match="blk.0.attn_q.weight has 63 rows"):
        next(iterate_weights(read_model_config(path)))


def test_target_dtype_and_progress(tmp_path):
    config = read_model_config(write_tiny(tmp_path / "m.gguf", "qwen3"))
    fractions: list[float] = []
    for name, tensor in iterate_weights(config, dtype=torch.bfloat16, progress=fractions.append):
        assert tensor.dtype == torch.bfloat16, name
        assert tensor.is_contiguous()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    kinds = {tensor.dtype for _, tensor in iterate_weights(config)}
    assert kinds == {torch.float32, torch.float16, torch.bfloat16}
