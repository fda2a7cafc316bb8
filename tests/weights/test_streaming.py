"""Streaming safetensors: the same tensors as the library reads, however they are cut, and the same refusals. On a GPU the same code
copies from pinned buffers on streams of its own."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.weights import streaming
from octavo.weights.streaming import Stream, read_header

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def stream(files: list[Path], device: str = "cpu", **options: int) -> dict[str, torch.Tensor]:
    with contextlib.closing(Stream(files, device, **options)) as source:
        return {name: tensor.cpu().clone() for name, tensor, _ in source}


def random_tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = int(torch.tensor(shape).prod()) if shape else 1
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 100, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit: random bits may be NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_every_type_however_it_is_cut(device: str, tmp_path: Path) -> None:
    shapes: list[list[int]] = [[], [0], [1], [3, 0, 2], [17], [5, 7], [64, 33]]
    tensors = {f"{d}{i}".removeprefix("torch."): random_tensor(s, d, i) for d in DTYPES for i, s in enumerate(shapes)}
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    names = list(tensors)
    save_file({n: tensors[n] for n in names[::2]}, files[0])
    save_file({n: tensors[n] for n in names[1::2]}, files[1])
    truth = load_file(files[0]) | load_file(files[1])
    for options in ({}, {"readers": 1, "chunk_bytes": 1}, {"readers": 3, "chunk_bytes": 97, "ahead_bytes": 0}, {"ahead_bytes": 500}):
        found = stream(files, device, **options)
        assert found.keys() == truth.keys() and all(equal(found[n], truth[n]) for n in truth)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    chunk=st.integers(1, 130),
    readers=st.integers(1, 5),
    ahead=st.integers(0, 900),
)
@settings(max_examples=60, deadline=None)
def test_tensors_come_whole_and_in_the_order_of_their_bytes(tmp_path_factory, sizes, chunk, readers, ahead) -> None:
    file = tmp_path_factory.mktemp("w") / "model.safetensors"
    tensors = {f"t{i}": random_tensor([n], torch.uint8, i) for i, n in enumerate(sizes)}
    save_file(tensors, file)
    found = stream([file], readers=readers, chunk_bytes=chunk, ahead_bytes=ahead)
    assert list(found) == [entry.name for entry in read_header(file)]
    assert all(equal(found[name], tensors[name]) for name in tensors)


def write(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        [],
        {"a": None},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [-8], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "U8", "shape": ["8"], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 9]}},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
        {"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}},
        {"a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]}},
        {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}},
    ],
)
def test_headers_that_cannot_be(header: object, tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read.*truncated or corrupt"):
        stream([file])
    assert not [t for t in threading.enumerate() if t.name.startswith("weights-")]


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_file_that_was_cut_off(keep: int, tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        stream([tmp_path / "x.safetensors"])


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.ones(1000) for i in range(20)}, file)
    found = []
    with (
        pytest.raises(ModelError, match="it ends at byte"),
        contextlib.closing(Stream([file], "cpu", chunk_bytes=64, ahead_bytes=0)) as source,
    ):
        for name, _, _ in source:
            found.append(name)
            os.truncate(file, 10_000)
    assert found
    assert not [t for t in threading.enumerate() if t.name.startswith("weights-")]


def test_a_reader_that_fails_is_told_and_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.ones(1000) for i in range(20)}, file)
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "input/output error")))
    with pytest.raises(ModelError, match="input/output error"):
        stream([file], chunk_bytes=64)
    assert not [t for t in threading.enumerate() if t.name.startswith("weights-")]


def test_one_who_leaves_early_ends_the_readers(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.ones(1000) for i in range(20)}, file)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(Stream([file], "cpu", chunk_bytes=64, ahead_bytes=5000)) as source:
        next(iter(source))
    assert not [t for t in threading.enumerate() if t.name.startswith("weights-")]
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer when a server of this process's other tests closes a connection just now


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1000)}, file)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    assert equal(stream([file])["a"], torch.arange(1000))


def test_no_more_is_ahead_than_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    save_file({f"t{i:02}": torch.ones(250) for i in range(30)}, file)  # 1,000 bytes each
    asked: list[int] = []
    ask = Stream._ask
    monkeypatch.setattr(Stream, "_ask", lambda self, *args: (asked.append(1), ask(self, *args))[1])
    with contextlib.closing(Stream([file], "cpu", ahead_bytes=3500)) as source:
        for i, _ in enumerate(source):
            assert len(asked) - i <= 4
    assert len(asked) == 30
    assert streaming.AHEAD_BYTES >= streaming.CHUNK_BYTES
