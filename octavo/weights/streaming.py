"""safetensors files to a device at the speed of disk and bus: many readers, pinned buffers, copies that nobody waits for.

A mapped file gives one thread its pages one fault after another, and a copy from memory that is not pinned goes through a buffer of the
driver's while the thread waits. Here a tensor is cut into chunks, and every reader has two pinned buffers: while one is on its way to
the device, the next chunk is read into the other.

    files     [tensor 0 | tensor 1      | tensor 2 ...]      in the order they lie on disk
    readers    chunk 0 -> buffer -> device    chunk 1 -> buffer -> device   ...
    caller     gets tensor 0 when its chunks are there, while tensors 1, 2, ... are read: up to AHEAD_BYTES of them

The format is https://huggingface.co/docs/safetensors: a length of 8 bytes, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelError

READERS = 8  # at most: one for every four chunks that there are
CHUNK_BYTES = 8 * 2**20
AHEAD_BYTES = 2**30  # on the device, of tensors that the caller has not taken yet
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its bytes are [begin, end), counted from the file's start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> list[Entry]:
    """The tensors of a safetensors file in the order of their bytes. ModelError if the file can't be what it says."""
    try:
        with open(file, "rb") as reader:
            size = os.fstat(reader.fileno()).st_size
            length = int.from_bytes(reader.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError("the header is longer than the file")
            header = json.loads(reader.read(length))
        entries = [_entry(name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"]
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        at = 8 + length
        for entry in entries:
            if entry.begin != at:
                raise ValueError(f"tensor {entry.name} begins at byte {entry.begin}, where {at} was expected")
            at = entry.end
        if at != size:
            raise ValueError(f"it has {size} bytes where its header tells of {at}")
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. It is truncated or corrupt; copy or download it again.") from error


def _entry(name: str, fields: dict[str, Any], start: int) -> Entry:
    dtype = _DTYPES.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name} is of type {fields['dtype']}, which is not supported ({', '.join(_DTYPES)} are)")
    shape, (begin, end) = tuple(fields["shape"]), fields["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name} of shape {list(shape)} in {fields['dtype']} does not have the bytes {begin} to {end}")
    return Entry(name, dtype, shape, start + begin, start + end)


@dataclass(slots=True)
class Arriving:
    """A tensor on its way. ``left`` chunks are to come; ``copies`` end when those that came are on the device."""

    entry: Entry
    bytes: torch.Tensor  # uint8, on the device
    ready: Any  # the memory may be written from here on
    left: int
    copies: list[Any] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Chunk:
    arriving: Arriving
    file: int  # descriptor
    path: Path
    begin: int  # of the tensor's bytes
    end: int


class Device:
    """Where the tensors go. CUDA: copies run on each reader's own stream, and events order them. Others: plain copies."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.cuda)

    def event(self) -> Any:
        """Of everything that the current stream was given until now; None where nothing runs behind the host."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def wait(self, event: Any) -> None:
        """What the current stream is given from now on comes after the event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """Wait for everything."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def stream(self) -> Any:
        """Context: a stream of the reader's own."""
        return torch.cuda.stream(torch.cuda.Stream(self.device)) if self.cuda else contextlib.nullcontext()


class Stream:
    """Iterate over (name, tensor on the device) of files, each read from front to back; ``close`` ends the readers."""

    def __init__(
        self, files: Sequence[Path], device: torch.device | str, *, readers: int = READERS, chunk_bytes: int = CHUNK_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:  # fmt: skip
        self.files = files
        self.device = Device(device)
        self.chunk_bytes, self.ahead_bytes = chunk_bytes, ahead_bytes
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stop = False
        self._descriptors: list[int] = []
        self._counting = threading.Lock()
        chunks = sum(path.stat().st_size for path in files) // chunk_bytes
        readers = max(1, min(readers, chunks // 4))
        self._threads = [threading.Thread(target=self._read, name=f"weights-{i}", daemon=True) for i in range(readers)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor, Path]]:
        """(name, tensor, file). ModelError for a file that is not what it should be."""
        for thread in self._threads:
            thread.start()
        waiting: deque[tuple[Path, Arriving]] = deque()
        ahead = 0
        for path, entry, descriptor in self._entries():
            while waiting and ahead + entry.end - entry.begin > self.ahead_bytes:
                ahead -= waiting[0][1].bytes.numel()
                yield self._take(*waiting.popleft())
            waiting.append((path, self._ask(path, entry, descriptor)))
            ahead += entry.end - entry.begin
        while waiting:
            yield self._take(*waiting.popleft())

    def _entries(self) -> Iterator[tuple[Path, Entry, int]]:
        for path in self.files:
            entries = read_header(path)
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error}.") from error
            self._descriptors.append(descriptor)
            for entry in entries:
                yield path, entry, descriptor

    def _ask(self, path: Path, entry: Entry, descriptor: int) -> Arriving:
        size = entry.end - entry.begin
        memory = torch.empty(size, dtype=torch.uint8, device=self.device.device)
        arriving = Arriving(entry, memory, self.device.event(), -(-size // self.chunk_bytes))
        if not arriving.left:
            arriving.done.set()
        for begin in range(0, size, self.chunk_bytes):
            self._chunks.put(Chunk(arriving, descriptor, path, begin, min(begin + self.chunk_bytes, size)))
        return arriving

    def _take(self, path: Path, arriving: Arriving) -> tuple[str, torch.Tensor, Path]:
        arriving.done.wait()
        if self._error is not None:
            raise self._error
        for copied in arriving.copies:
            self.device.wait(copied)
        entry = arriving.entry
        return entry.name, arriving.bytes.view(entry.dtype).view(entry.shape), path

    def _read(self) -> None:
        """A reader's thread."""
        chunk = None
        try:
            with torch.inference_mode(), self.device.stream():
                buffers = deque((self.device.buffer(self.chunk_bytes), None) for _ in range(2))
                while (chunk := self._chunks.get()) is not None and not self._stop:
                    buffer, used = buffers.popleft()
                    if used is not None:
                        used.synchronize()  # the copy out of it, two chunks ago
                    part = buffer[: chunk.end - chunk.begin]
                    _fill(part, chunk)
                    self.device.wait(chunk.arriving.ready)
                    chunk.arriving.bytes[chunk.begin : chunk.end].copy_(part, non_blocking=True)
                    copied = self.device.event()
                    buffers.append((buffer, copied))
                    self._arrived(chunk.arriving, copied)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self._fail(error, chunk)

    def _arrived(self, arriving: Arriving, copied: Any) -> None:
        with self._counting:
            arriving.copies.append(copied)
            arriving.left -= 1
            if not arriving.left:
                arriving.done.set()

    def _fail(self, error: BaseException, chunk: Chunk | None) -> None:
        """The first error is told; nobody waits for what does not come."""
        if self._error is None:
            self._error = error
        self._stop = True
        while chunk is not None:
            chunk.arriving.done.set()
            try:
                chunk = self._chunks.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """End the readers, and what they copy to memory that is given back now."""
        self._stop = True
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.device.settle()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def _fill(part: torch.Tensor, chunk: Chunk) -> None:
    view = memoryview(part.numpy())
    at, got = chunk.arriving.entry.begin + chunk.begin, 0
    while got < len(view):
        try:
            count = os.preadv(chunk.file, [view[got:]], at + got)
        except OSError as error:
            raise ModelError(f"{chunk.path} cannot be read: {error}.") from error
        if not count:
            raise ModelError(f"{chunk.path} cannot be read: it ends at byte {at + got}. It was cut off while it was being read.")
        got += count
