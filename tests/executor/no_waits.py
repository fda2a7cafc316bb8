"""A step as a GPU's host code submits it, without a GPU, and an error where the host would wait for the device.

PyTorch's fake tensors have a device, a shape and a type, and no data. Host code that never waits never needs the data: so the real
model runner, told that its device is a GPU, runs real plans on them. Triton's kernels are skipped. What needs a value, or a size that
follows from values, raises by itself; ``NoWaits`` raises for copies that wait and for operators that make such copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.attention.base import AttentionBackend
from octavo.types import StepPlan, TokenMasks

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # c10::DeviceType
_INDEX_PUTS = (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default, aten._unsafe_index_put.default)


class HostWaits(AssertionError):
    """What was asked for makes the host wait for the device."""


class NoWaits(TorchDispatchMode):
    """Raises HostWaits, over a FakeTensorMode, for

    - copies between host and GPU that are not ``non_blocking``, whose side on the host isn't pinned, or that convert on the way;
    - operators that take tensors of both: ``tensor[index] = number`` is one, and copies the number from ordinary memory;
    - assignments through a boolean mask, which count it first, and segment_reduce that checks its lengths. What other operators read
      in the host's part of their kernels can't be seen here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[int, Any] = {}  # storages, kept so that their addresses stay theirs; they hold no data

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        with self:  # in inference mode operators made of others come whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self.pin(torch.empty_like(args[0]))
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        if func is aten._to_copy.default:
            return self._converted(func, *args, **kwargs)
        if func is aten.copy_.default:
            self._check_copy(args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
        elif func is not aten.fill_.Tensor:  # takes a number's value, as an argument of its kernel
            _check_operator(func, args, kwargs)
        return func(*args, **kwargs)

    def _converted(self, func: Any, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``tensor.to(…)``."""
        result = func(source, **kwargs)
        if source.is_cuda and result.is_cpu and kwargs.get("non_blocking"):
            self.pin(result)  # PyTorch takes pinned memory for it
        self._check_copy(result, source, kwargs.get("non_blocking", False))
        return result

    def _check_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        if target.device.type == source.device.type:
            return
        names = f"a copy of {source.dtype} {tuple(source.shape)} from {source.device} to {target.device}"
        if not non_blocking:
            raise HostWaits(f"{names} is not non_blocking")
        if not self.is_pinned(source if source.is_cpu else target):
            raise HostWaits(f"{names} meets memory of the host that is not pinned")
        if source.dtype != target.dtype or not source.is_contiguous() or not target.is_contiguous():
            raise HostWaits(f"{names} goes through memory that is not pinned: type or strides differ")


def _check_operator(func: Any, args: Any, kwargs: Any) -> None:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    devices = {t.device.type for t in tensors}
    if len(devices) > 1:
        raise HostWaits(f"{func} takes tensors of {sorted(devices)}, so one of them is copied first")
    if func in _INDEX_PUTS and "cuda" in devices and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        raise HostWaits(f"{func} through a mask counts it first")
    if func is aten.segment_reduce.default and not kwargs.get("unsafe"):
        raise HostWaits(f"{func} reads the lengths to check them, unless it is told that it is unsafe")


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None:
        _wait()


class _Stream:
    def __init__(self, device: torch.device) -> None: ...


def _wait(*_: object) -> None:
    raise HostWaits("the host waits for the device")


@contextmanager
def pretended_gpu() -> Iterator[FakeTensorMode]:
    """What host code calls of a GPU answers; tensors that are made on one under the mode that this gives have no data."""
    from octavo.attention import triton as attention
    from octavo.executor.graph_pool import GraphPool
    from octavo.executor.swap import SwapSpace
    from octavo.kernels.triton import linear
    from octavo.kernels.triton.launch import skipped_launches

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "synchronize", _wait)
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(attention, "_multiprocessors", lambda device: 4)
    patch.setattr(GraphPool, "run", lambda self, key, body, *_: body())
    patch.setattr(SwapSpace, "_measure", lambda self: 0.0)
    linear.workspace.cache_clear()
    try:
        with _lent_guard(), skipped_launches():
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        patch.undo()
        linear.workspace.cache_clear()


@contextmanager
def _lent_guard() -> Iterator[None]:
    """A PyTorch without CUDA refuses to index even tensors without data where they are said to be on a GPU, for it can't make that
    the current device. Lend it what does nothing for the device "meta"."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    own = registry[_CUDA]
    registry[_CUDA] = registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = own


class Shadow:
    """A model runner of the same sizes as an LLM's on the CPU, on a pretended GPU, which runs the same plans. Use in ``pretended_gpu``."""

    def __init__(self, llm: Any, fake: FakeTensorMode, backend: AttentionBackend) -> None:
        from octavo.executor.model_runner import ModelRunner

        executor, config = llm.executor, llm.config
        self.fake, self.waits, self.pending = fake, NoWaits(), None
        with fake, torch.no_grad():
            model = make_model(llm)
            caches = [
                backend.make_kv_cache(executor.num_blocks, config.block_size, s.num_kv_heads, s.head_dim, torch.bfloat16, GPU)
                for s in model.attention_layers
            ]
            self.runner = ModelRunner(
                model, backend, caches, block_size=config.block_size, max_rows=config.rows, max_model_len=executor.max_model_len,
                vocab_size=llm.model_config.vocab_size, device=GPU, use_graphs=True,
            )  # fmt: skip
            if executor.num_cpu_blocks:
                self.runner.swap = self._swap_space(caches, executor.num_cpu_blocks)

    def _swap_space(self, caches: list[torch.Tensor], num_blocks: int) -> Any:
        from octavo.executor.swap import WORD, SwapSpace

        words = sum(cache[0].nbytes for cache in caches) // WORD.itemsize
        memory: Any = SimpleNamespace(words=self.waits.pin(torch.empty(num_blocks * words, dtype=WORD)))
        return SwapSpace(memory, torch.empty(3, words, dtype=WORD, device=GPU), caches)

    def submit(self, plan: StepPlan) -> None:
        with self.fake, self.waits:
            self.pending = self.runner.execute(plan)

    def sample(self, masks: TokenMasks) -> None:
        assert self.pending is not None
        with self.fake, self.waits:
            self.runner.sample(self.pending, masks)


class EncoderShadow:
    """The same for encoders."""

    def __init__(self, llm: Any, fake: FakeTensorMode) -> None:
        from octavo.executor.encoder import EncoderExecutor
        from octavo.sampling.pooling import Pooler

        self.fake, self.waits = fake, NoWaits()
        self.executor = EncoderExecutor.__new__(EncoderExecutor)
        self.executor.device = GPU
        with fake, torch.no_grad():
            self.executor.model = make_model(llm)
            self.executor.pooler = Pooler(llm.config.rows)

    def submit(self, plan: StepPlan) -> None:
        with self.fake, self.waits:
            self.executor._run(plan.advances)


def make_model(llm: Any) -> Any:
    """The LLM's model in bfloat16 on the pretended GPU."""
    from octavo.distributed.group import Group
    from octavo.layers import ops
    from octavo.models.decoder import Build
    from octavo.models.loader import finalize
    from octavo.models.registry import model_class
    from octavo.quantization.unquantized import UnquantizedScheme

    config = llm.model_config
    with torch.device(GPU):
        scheme = UnquantizedScheme(prepack=ops.prepack_linear)
        model: Any = model_class(config.architecture)(Build(config, Group.single(), scheme, torch.bfloat16, llm.executor.max_model_len))
    model.requires_grad_(False).eval()
    finalize(model)
    return model
