"""Finds out which Triton kernels a model's steps launch, with which arguments, without a GPU: by running them on nothing.

The steps are the engine's own code. Tensors stand on torch's "meta" device, which has shapes and no memory, and say that they
are on a GPU; the launches are noted instead of made. What Triton compiles for depends on arguments' types, alignment, and
whether integers are 1 or divisible by 16, all of which stand-ins have like the real ones.

Changes torch and Triton for the whole process: only for ``octavo.executor.warmup``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from octavo.config import MANY_ROWS, EngineConfig
from octavo.executor.kernel_keys import begin_library_key, settle_cache_keys
from octavo.executor.memory import MANY_ROWS_BYTES
from octavo.executor.warmup import Gpu
from octavo.models.config import ModelConfig, RopeConfig

Compile = Callable[..., Any]


class Pointer:
    """Stands for a tensor among a kernel's arguments: Triton asks for the type, and whether the address is divisible by 16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.storage_offset() * tensor.element_size()  # storages are aligned to more than 16 bytes

    def data_ptr(self) -> int:
        return self._address

    @property
    def key(self) -> tuple[Any, ...]:
        return ("pointer", self.dtype, self._address % 16 == 0)


@dataclass(frozen=True)
class Launch:
    """``compile`` puts the kernel into Triton's cache on disk. ``first``: an answer to the first request needs it."""

    name: str
    first: bool
    compile: Callable[[], Any]


# Seconds of those that take longest to compile (others 0.1 to 0.2; and a launcher each). The first answer waits for the last kernel, so
# they are begun first: one that is begun when most are done lets all other processes wait.
_SLOW = {"_decode_kernel": 2.0, "_extend_kernel": 0.9, "skinny_kernel": 0.4}


class Recorder:
    """Takes the place of ``JITFunction.run``; keeps each distinct launch once, in order."""

    def __init__(self, run: Compile) -> None:
        self.run = run
        self.launches: dict[Any, Launch] = {}
        self.first = True

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        args = tuple(Pointer(a) if isinstance(a, torch.Tensor) else a for a in args)
        options = {name: Pointer(a) if isinstance(a, torch.Tensor) else a for name, a in options.items()}
        loose = [bool(getattr(p, "do_not_specialize", False)) for p in kernel.params]
        kinds = tuple(_kind(a, *rest) for a, *rest in zip(args, loose, strict=False))
        key = (id(kernel), kinds, tuple(sorted((name, str(value)) for name, value in options.items())))
        if key not in self.launches:
            name = getattr(kernel, "__name__", str(kernel))

            def compile() -> None:
                build_launcher(self.run(kernel, *args, grid=(1,), warmup=True, **options))

            self.launches[key] = Launch(name, self.first, compile)


def build_launcher(compiled: Any) -> None:
    """Up to Triton 3.6 a C compiler makes a launcher for each kind of signature, and keeps it on disk like the kernel."""
    with suppress(Exception):  # made by the engine then
        from triton.backends.nvidia import driver

        if hasattr(driver, "make_launcher"):  # later ones have one launcher for all
            driver.CudaLauncher(compiled.src, compiled.metadata)


def build_driver_module() -> None:
    """The C module through which Triton talks to the driver; kept on disk. Makes no context."""
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def _kind(value: Any, loose: bool) -> Any:
    """What of an argument Triton compiles for; ``loose``: nothing but its type. Constants are given by keyword, and compared as
    they are."""
    if isinstance(value, Pointer):
        return value.key[:2] if loose else value.key
    if isinstance(value, bool) or value is None or not isinstance(value, int):
        return type(value).__name__
    size = -(2**31) <= value < 2**31
    return ("int", size) if loose else ("int", size, value == 1, value % 16 == 0)


class Driver:
    """What Triton asks its driver when it compiles."""

    def __init__(self, gpu: Gpu) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def trace(request: dict[str, Any], gpu: Gpu) -> Iterator[list[Launch]]:
    """The kernels that the model's steps need: those of the first answer, then the others. ``request``: by ``warmup.describe``."""
    _spare_imports()
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(Driver(gpu))
    settle_cache_keys()
    library_key = begin_library_key()
    _pretend(gpu)
    recorder = Recorder(JITFunction.run)
    JITFunction.run = lambda kernel, *args, **options: recorder(kernel, *args, **options)
    parts = steps(request, gpu)
    for wanted in (True, False):
        recorder.first = wanted
        with torch.inference_mode():
            for first, part in parts:
                if first == wanted:
                    part()
        found = [launch for launch in recorder.launches.values() if launch.first == wanted]
        if wanted:  # the others stay in the order in which they are likely to be asked for
            found.sort(key=lambda launch: -_SLOW.get(launch.name, 0.0))
            library_key.join()
        yield found


class _Stub(ModuleType):
    """Stands for a module of torch that takes seconds to import and of which one function is called here; asked for anything
    else, it makes room for the module itself."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        self.__dict__.update(contents)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from importlib import import_module

        sys.modules.pop(self.__name__, None)
        return getattr(import_module(self.__name__), name)


def _spare_imports() -> None:
    """Operations on "meta" tensors ask for torch's compiler, only to say that they are not to be compiled."""
    stubs = (
        _Stub("torch._dynamo", disable=lambda fn=None, recursive=True, **_: fn),
        # what these say of plain integers, which all sizes are here
        _Stub(
            "torch.fx.experimental.symbolic_shapes",
            **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"), bool),
            **dict.fromkeys(("has_hint", "has_guarding_hint"), lambda size: True),
            guarding_hint_or_throw=int,
            is_nested_int=lambda size: False,
        ),
    )
    for stub in stubs:
        sys.modules.setdefault(stub.__name__, stub)


def _pretend(gpu: Gpu) -> None:
    """Make tensors without memory look like a GPU's, to code that asks."""
    from octavo.attention import triton as attention
    from octavo.executor import graph_pool, step_graphs
    from octavo.kernels.triton import launch

    torch.cuda.is_available = lambda: False  # nothing here may make a context on the GPU
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,method-assign]
    launch.remember_launches(False)
    launch._supported = lambda index: gpu.capability >= (9, 0)
    attention._multiprocessors = lambda device: gpu.multiprocessors

    class NoPool(graph_pool.GraphPool):
        """Bodies are run one by one here; nothing is captured."""

        def __init__(self, rows: Any) -> None:
            super().__init__(rows)
            self.on_gpu = True

    step_graphs.GraphPool = NoPool  # type: ignore[misc]


def steps(request: dict[str, Any], gpu: Gpu) -> list[tuple[bool, Callable[[], Any]]]:
    """(needed for the first answer, something to run) in order."""
    from octavo.executor.step_graphs import LOGITS
    from octavo.executor.step_sizes import MAX_PROMPTS, prompt_sizes
    from octavo.sampling.sampler import GREEDY, RANDOM, TRUNCATED

    runner = make_runner(request, gpu)
    graphs = runner.graphs
    if graphs is None:
        return []
    mixed, alone = graphs.mixed_sizes[1:], prompt_sizes(0)

    def decode(bucket: int, mode: str) -> Callable[[], Any]:
        return lambda: graphs._decode_body(bucket, mode)

    def prompts(decodes: int, tokens: int, mode: str) -> Callable[[], Any]:
        return lambda: graphs._mixed_body(decodes, tokens, MAX_PROMPTS, mode)

    def long_prompts(tokens: int, mode: str) -> Callable[[], Any]:
        packed = torch.empty(3 * tokens + 6 * 2 + 1, dtype=torch.int64, device=runner.device)
        return lambda: graphs._mixed_body(mixed[0], tokens, 2, mode, packed, tokens)

    def masked(mode: str) -> Callable[[], Any]:
        graphs.make_mask_bits(-(-runner.vocab_size // 32))
        return lambda: graphs._draw_body(1, mode)

    modes = (GREEDY, RANDOM, TRUNCATED)
    # What the warm-up runs, which the first answer waits for, and then what a first request is likely to ask for.
    found: list[tuple[bool, Callable[[], Any]]] = [(True, lambda: uploads(runner))]
    found += [(True, prompts(0, alone[0], mode)) for mode in (GREEDY, RANDOM)] + [(True, decode(1, GREEDY))]
    found += [(False, prompts(0, alone[0], TRUNCATED))] + [(False, decode(1, mode)) for mode in (RANDOM, TRUNCATED, LOGITS)]
    found += [(False, lambda: eager(runner))] + [(False, long_prompts(tokens, mode)) for tokens in (4096, 4097) for mode in modes]
    found += [(False, prompts(0, tokens, mode)) for tokens in (alone[-1], *alone[1:3]) for mode in modes]
    found += [(False, decode(bucket, mode)) for bucket in graphs.sizes[1:] for mode in (*modes, LOGITS)]
    found += [(False, masked(mode)) for mode in modes]
    # What varies with prompts' tokens is whether there are few rows, and then how many.
    found += [(False, prompts(d, t, mode)) for d in mixed for t in (*prompt_sizes(d)[:3], prompt_sizes(d)[-1]) for mode in modes]
    return found


def uploads(runner: Any) -> None:
    """The launch of ``BatchRows.update``, for few and for many pairs."""
    from octavo.kernels.triton.rows import scatter_pairs

    for count in (1, 2, 16):
        scatter_pairs(torch.empty(count, 2, dtype=torch.int64, device=runner.device), runner.rows.block_table)


def eager(runner: Any) -> None:
    """A step that no body of ``StepGraphs`` runs: the same layers, block tables gathered by the host."""
    from octavo.attention.base import AttentionMetadata, ForwardContext

    tokens, device = 4096, runner.device

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    for num_seqs in (1, 2):
        metadata = AttentionMetadata(
            num_tokens=tokens,
            num_seqs=num_seqs,
            num_decodes=num_seqs - 1,
            max_query_len=tokens,
            max_seq_len=tokens,
            block_size=runner.block_size,
            positions=ints(tokens),
            slots=ints(tokens),
            query_start=ints(num_seqs + 1, dtype=torch.int32),
            seq_lens=ints(num_seqs, dtype=torch.int32),
            block_tables=ints(num_seqs, runner.rows.block_table.shape[1], dtype=torch.int32),
        )
        runner.backend.prepare(metadata)
        runner.model(ints(tokens), ForwardContext(metadata, runner.backend, runner.kv_caches))


def make_runner(request: dict[str, Any], gpu: Gpu) -> Any:
    """A ModelRunner whose tensors have no memory, on a model of few layers: all of a kind launch the same kernels."""
    from octavo.executor.local import resolve_dtype
    from octavo.executor.model_runner import ModelRunner
    from octavo.models import loader

    config, fields = EngineConfig(**request["config"]), dict(request["model"])
    if gpu.total_memory >= MANY_ROWS_BYTES and config.max_num_seqs is None:
        config = replace(config, max_num_seqs=MANY_ROWS)
    fields |= {"path": "", "rope": RopeConfig(**fields["rope"])}
    if fields["sliding_window_layers"] is not None:
        fields["sliding_window_layers"] = tuple(fields["sliding_window_layers"])
    model_config = few_layers(ModelConfig(**fields))
    device, dtype = torch.device("meta"), resolve_dtype(config.dtype, model_config, torch.device("cuda"))
    loader._fill = lambda *args, **options: None  # there is nothing to fill
    model = loader.load_model(model_config, dtype=dtype, device=device, load_format="dummy", max_model_len=request["max_model_len"])
    backend = make_backend(config, dtype)
    caches = [
        backend.make_kv_cache(2, config.block_size, spec.num_kv_heads, spec.head_dim, dtype, device) for spec in model.attention_layers
    ]
    return ModelRunner(
        model,
        backend,
        caches,
        block_size=config.block_size,
        max_rows=config.rows,
        max_model_len=request["max_model_len"],
        vocab_size=model_config.vocab_size,
        device=device,
        use_graphs=not config.enforce_eager,
    )


def few_layers(model: ModelConfig) -> ModelConfig:
    """Two layers of each kind (the first has no residual); kinds differ by sliding window."""
    windowed = model.sliding_window_layers
    mixed = model.sliding_window is not None and windowed is not None and 0 < len(set(windowed)) < model.num_layers
    count = min(model.num_layers, 4 if mixed else 2)
    if not mixed:
        whole = windowed is None or len(set(windowed)) == model.num_layers
        return replace(model, num_layers=count, sliding_window_layers=None if whole else ())
    return replace(model, num_layers=count, sliding_window_layers=tuple(range(count // 2, count)))


def make_backend(config: EngineConfig, dtype: torch.dtype) -> Any:
    """The Triton backend; without its prompts' kernel where FlashAttention 3 will run them."""
    from octavo.attention.triton import TritonAttention
    from octavo.kernels import flash_attention_3 as fa3

    class PromptsElsewhere(TritonAttention):
        def extend(self, qkv: Any, layer: Any, cache: Any, m: Any, out: Any) -> None:
            if not fa3.covers(layer.head_dim, qkv.dtype, layer.logit_soft_cap):
                super().extend(qkv, layer, cache, m, out)

    from importlib.util import find_spec

    flash = config.attention_backend in ("auto", "flash") and find_spec("flash_attn_3") is not None
    return PromptsElsewhere(pdl=_pdl()) if flash else TritonAttention(pdl=_pdl())


def _pdl() -> bool:
    from octavo.kernels.triton import launch

    return launch._supported(0)


__all__ = ["Launch", "few_layers", "trace"]
