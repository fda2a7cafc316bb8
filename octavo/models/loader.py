"""Build a model on its device and fill it from a checkpoint, strictly: every parameter once, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from octavo.distributed.group import Group
from octavo.errors import ModelError
from octavo.layers import ops
from octavo.layers.slots import WeightSlot
from octavo.models.config import ModelConfig
from octavo.models.decoder import Build, DecoderForCausalLM, check_config
from octavo.models.registry import model_class
from octavo.quantization.base import LinearScheme
from octavo.quantization.unquantized import UnquantizedScheme

_NAMED_IN_ERRORS = 5  # names listed per kind of problem


def load_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    group: Group | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    max_model_len: int | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    scheme: LinearScheme | None = None,
) -> DecoderForCausalLM:
    """The model of ``config``, ready to run: in eval mode, on ``device``, weights loaded and packed.

    ``max_model_len``: longest sequence that will be served (default: what the checkpoint supports); positions must stay below it.
    ``weights`` replaces reading the checkpoint: (name, whole tensor) pairs under Hugging Face names, each name once.
    ``load_format`` "dummy" fills seeded random values instead. ``progress`` is called with a growing fraction, 1.0 last.
    Raises ModelError for an unsupported architecture or setting, and for weights that do not fit, by name; ConfigError for a
    group size that the model's widths can't be cut to.
    """
    check_config(config)
    build = Build(
        config=config,
        group=group or Group.single(),
        scheme=scheme or UnquantizedScheme(prepack=ops.prepack_linear),
        dtype=dtype,
        max_model_len=max_model_len or config.max_position,
    )
    with torch.device(device):
        model = model_class(config.architecture)(build)
    model.requires_grad_(False).eval()
    with torch.no_grad():
        _fill(model, config, dtype=dtype, device=device, load_format=load_format, seed=seed, progress=progress, weights=weights)
        finalize(model)
    if progress:
        progress(1.0)
    return model


def _fill(
    model: DecoderForCausalLM,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str,
    seed: int,
    progress: Callable[[float], None] | None,
    weights: Iterable[tuple[str, torch.Tensor]] | None,
) -> None:
    if weights is None:
        # here and not above: reading checkpoints pulls in libraries that injected weights don't need
        from octavo import weights as readers

        if load_format == "dummy":
            readers.fill_dummy(model.named_parameters(), seed)
            return
        weights = readers.iterate_weights(config, load_format=load_format, dtype=dtype, device=device)
    fill_from(model, weights, source=config.path, progress=progress)


def collect_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Checkpoint name -> where the tensor goes, for the whole model. A parameter without a place is a mistake in the model."""
    slots: dict[str, WeightSlot] = {}
    for prefix, module in model.named_modules():
        declare = getattr(module, "weight_slots", None)
        for name, slot in declare(prefix) if declare else ():
            if name in slots:
                raise AssertionError(f"two modules take the checkpoint tensor {name}")
            slots[name] = slot
    taken = {id(slot.parameter) for slot in slots.values()}
    forgotten = [name for name, parameter in model.named_parameters() if id(parameter) not in taken]
    if forgotten:
        raise AssertionError(f"no checkpoint tensor fills {', '.join(forgotten)}")
    return slots


def fill_from(
    model: DecoderForCausalLM,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: str,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Copy ``weights`` into the model. ModelError naming missing, left-over, repeated and mis-shaped tensors, all at once."""
    slots = collect_slots(model)
    total = sum(slot.destination.numel() for slot in slots.values())
    missing, done, reported = dict.fromkeys(slots), 0, 0.0
    left_over: list[str] = []
    repeated: list[str] = []
    misshaped: list[str] = []
    for stored_name, tensor in weights:
        name = model.checkpoint_name(stored_name)
        slot = slots.get(name)
        if slot is None:
            if not name.endswith(model.ignored_weights):
                left_over.append(name)
            continue
        if name not in missing:
            repeated.append(name)
            continue
        del missing[name]
        if tuple(tensor.shape) != slot.shape:
            misshaped.append(f"{name} is {list(tensor.shape)} and should be {list(slot.shape)}")
            continue
        slot.load(tensor)
        done += slot.destination.numel()
        if progress and 0.01 <= done / total - reported and done < total:
            reported = done / total
            progress(reported)
    _refuse_misfits(model, source, missing=list(missing), left_over=left_over, repeated=repeated, misshaped=misshaped)


def _refuse_misfits(model: nn.Module, source: str, **problems: list[str]) -> None:
    words = {
        "missing": "missing",
        "left_over": "not part of the model",
        "repeated": "there more than once",
        "misshaped": "of another shape",
    }
    found = [f"{len(names)} {words[kind]}: {_first(names)}" for kind, names in problems.items() if names]
    if found:
        raise ModelError(
            f"The weights in {source} do not fit {type(model).__name__}. Tensors {'; '.join(found)}. "
            "Check that the weights and the configuration belong together and that the download is complete."
        )


def _first(names: list[str]) -> str:
    rest = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def finalize(model: nn.Module) -> None:
    """Let every layer repack its weights for speed. Parameters that were replaced are freed one layer at a time."""
    for module in model.modules():
        if hasattr(module, "finalize"):
            module.finalize()
