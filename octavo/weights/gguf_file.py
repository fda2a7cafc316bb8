"""Reading GGUF files: metadata and where tensors lie. Parses the mapped file itself, without torch and numpy.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The ``gguf``
package's reader builds several numpy arrays per string, which costs seconds for a vocabulary; this one takes
milliseconds, because arrays are only located here and decoded when somebody asks for them.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.weights.files import gguf_shards

# type number: (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_STRING, _ARRAY = 8, 9
# metadata value type: struct format (also array.array's type code, with the same size on every platform we run on)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file. ``shape`` is in torch's order (rows first); ``offset`` counts from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int
    buffer: mmap.mmap


@dataclass(frozen=True)
class _LazyArray:
    """An array in the metadata that has been located but not decoded."""

    key: str
    item_type: int
    count: int
    offset: int


class GgufFile(Mapping[str, Any]):
    """A GGUF model: a mapping of its metadata (arrays decoded on first use), and ``tensors`` by name.

    A split model (``…-00001-of-00003.gguf``) is opened whole, whichever of its files is named.

    Raises:
        ModelError: not a GGUF file, truncated, of an unknown version or tensor type; a shard that is missing.
    """

    def __init__(self, path: str | Path) -> None:
        paths = gguf_shards(path)
        first = _Parser(paths[0])
        self.path = str(paths[0])
        self.version = first.version
        self._buffer = first.buffer
        self._metadata = first.metadata
        self.tensors: dict[str, GgufTensor] = {}
        for parser in [first, *(_Parser(p) for p in paths[1:])]:
            for tensor in parser.tensors:
                if tensor.name in self.tensors:
                    raise ModelError(f"{parser.path}: tensor {tensor.name} occurs twice.")
                self.tensors[tensor.name] = tensor

    def __getitem__(self, key: str) -> Any:
        value = self._metadata[key]
        if isinstance(value, _LazyArray):
            value = self._metadata[key] = _decode_array(self.path, self._buffer, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)

    def array_length(self, key: str) -> int | None:
        """Number of items of an array value, without decoding it; None when there is no such array."""
        value = self._metadata.get(key)
        if isinstance(value, _LazyArray):
            return value.count
        return len(value) if isinstance(value, list) else None

    def small_metadata(self, limit: int = 64) -> dict[str, Any]:
        """All metadata but arrays longer than ``limit`` (token lists, merges)."""
        return {key: self[key] for key in self if (self.array_length(key) or 0) <= limit}

    def read_float32(self, name: str) -> list[float] | None:
        """A small F32 tensor's values; None when there is no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type_name != "F32":
            raise ModelError(f"{self.path}: tensor {name} has type {tensor.type_name}; F32 is expected.")
        return list(struct.unpack_from(f"<{tensor.num_bytes // 4}f", tensor.buffer, tensor.offset))


class _Parser:
    """One pass over one file's header. ``metadata`` values are scalars, strings and lists or ``_LazyArray``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = _map_file(path)
        self.offset = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        try:
            self._parse()
        except (struct.error, IndexError) as error:
            raise ModelError(f"{path}: the GGUF header is truncated or corrupt ({error}). Copy or download the file again.") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: the GGUF metadata holds text that is not UTF-8 ({error}).") from error

    def _parse(self) -> None:
        if self.buffer[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file (it does not begin with 'GGUF').")
        self.offset = 4
        self.version = self._scalar(4)
        if self.version not in (2, 3):
            big_endian = self.version in (2 << 24, 3 << 24)
            raise ModelError(
                f"{self.path}: GGUF version {self.version} is not supported; supported: 2, 3"
                + (" (this file is big-endian)." if big_endian else ".")
            )
        num_tensors, num_values = self._scalar(10), self._scalar(10)
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(key, self._scalar(4))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 2:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}; an even number is expected.")
        data_start = -(-self.offset // alignment) * alignment
        self.tensors = [self._place(data_start, *entry) for entry in entries]

    def _scalar(self, value_type: int) -> Any:
        code = _SCALARS[value_type]
        (value,) = struct.unpack_from("<" + code, self.buffer, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar(10)
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.buffer):
            raise IndexError("a string runs past the end of the file")
        return self.buffer[start : self.offset].decode("utf-8")

    def _value(self, key: str, value_type: int) -> Any:
        if value_type in _SCALARS:
            return self._scalar(value_type)
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            raise ModelError(f"{self.path}: metadata {key!r} has unknown type {value_type}; the file is corrupt or too new.")
        item_type, count = self._scalar(4), self._scalar(10)
        lazy = _LazyArray(key, item_type, count, self.offset)
        if item_type in _SCALARS:
            self.offset += count * struct.calcsize("<" + _SCALARS[item_type])
        elif item_type == _STRING:
            self.offset = _skip_strings(self.buffer, self.offset, count)
        elif item_type == _ARRAY:
            return [self._value(key, _ARRAY) for _ in range(count)]  # nested arrays: unused in practice, so not lazy
        else:
            raise ModelError(f"{self.path}: metadata {key!r} is an array of unknown type {item_type}; the file is corrupt or too new.")
        if self.offset > len(self.buffer):
            raise IndexError(f"array {key!r} runs past the end of the file")
        return lazy

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar(4)
        if num_dims > 8:
            raise IndexError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar(10) for _ in range(num_dims))[::-1]  # ggml lists the innermost dimension first
        return name, shape, self._scalar(4), self._scalar(10)

    def _place(self, data_start: int, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> GgufTensor:
        if type_number not in TENSOR_TYPES:
            supported = ", ".join(entry[0] for entry in TENSOR_TYPES.values())
            raise ModelError(f"{self.path}: tensor {name} has unknown type number {type_number}; supported: {supported}.")
        type_name, block_size, block_bytes = TENSOR_TYPES[type_number]
        if not shape or shape[-1] % block_size:
            raise ModelError(f"{self.path}: tensor {name} of shape {list(shape)} does not divide into {type_name} blocks of {block_size}.")
        num_elements = 1
        for size in shape:
            num_elements *= size
        num_bytes = num_elements // block_size * block_bytes
        end = data_start + offset + num_bytes
        if end > len(self.buffer):
            raise ModelError(
                f"{self.path} is truncated: tensor {name} ends at byte {end}, the file has {len(self.buffer)}. "
                "Copy or download the file again."
            )
        return GgufTensor(name, shape, type_name, data_start + offset, num_bytes, self.buffer)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist (a GGUF model split over several files needs all of them in one folder).") from error
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read: {error}.") from error


def _skip_strings(buffer: mmap.mmap, offset: int, count: int) -> int:
    unpack = _U64.unpack_from
    for _ in range(count):
        offset += 8 + unpack(buffer, offset)[0]
    return offset


def _decode_array(path: str, buffer: mmap.mmap, lazy: _LazyArray) -> list[Any]:
    if lazy.item_type != _STRING:
        code = _SCALARS[lazy.item_type]
        size = struct.calcsize("<" + code) * lazy.count
        raw = buffer[lazy.offset : lazy.offset + size]
        if code == "?":
            return [byte != 0 for byte in raw]
        return array(code, raw).tolist() if struct.pack("=H", 1) == b"\1\0" else list(struct.unpack(f"<{lazy.count}{code}", raw))
    unpack, offset, strings = _U64.unpack_from, lazy.offset, []
    try:
        for _ in range(lazy.count):
            start = offset + 8
            offset = start + unpack(buffer, offset)[0]
            strings.append(buffer[start:offset].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: metadata {lazy.key!r}, item {len(strings)}, is not UTF-8 ({error}).") from error
    return strings
