"""Which attention backend runs where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.config import ATTENTION_DEVICES
from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.attention.base import AttentionBackend


def select_backend(device: torch.device | str, name: str | None = None) -> AttentionBackend:
    """The best backend for a device, or the one that is named (``config.ATTENTION_DEVICES``; None and "auto" choose).

    ConfigError for a name that isn't there, or one that can't run on the device.
    """
    kind = str(device).partition(":")[0]
    if name in (None, "auto"):
        name = _best(kind)
    if name not in ATTENTION_DEVICES:
        raise ConfigError(f"Unknown attention backend {name!r}; there are {', '.join(ATTENTION_DEVICES)}.")
    if kind not in ATTENTION_DEVICES[name]:
        fitting = [n for n, kinds in ATTENTION_DEVICES.items() if kind in kinds]
        raise ConfigError(f"Attention backend {name} can't run on device {device}; use one of {', '.join(fitting)}.")
    return _make(name)


def _best(kind: str) -> str:
    if kind == "cpu":
        return "cpu"
    if kind != "cuda":
        raise ConfigError(f"There is no attention backend for device {kind}. Use --device cpu.")
    from octavo.attention.flash_attention import available

    return "flash" if available() else "triton"


def _make(name: str) -> AttentionBackend:
    if name == "cpu":
        from octavo.attention.cpu import CpuAttention

        return CpuAttention()
    if name == "reference":
        from octavo.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "triton":
        from octavo.attention.triton import TritonAttention

        return TritonAttention()
    from octavo.attention.flash_attention import FlashAttention, available

    if not available():
        raise ConfigError(
            "--attention-backend flash needs a Hopper GPU and the wheel tokenspeed-fa3. Use triton, or pip install tokenspeed-fa3."
        )
    return FlashAttention()
