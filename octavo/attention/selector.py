"""Which attention backend runs where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.attention.base import AttentionBackend

BACKENDS = ("cpu", "reference")


def select_backend(device: torch.device | str, name: str | None = None) -> AttentionBackend:
    """The best backend for a device, or the one that is named (``BACKENDS``). ConfigError for a name or device without one."""
    kind = str(device).partition(":")[0]
    if name is None:
        if kind != "cpu":
            raise ConfigError(f"There is no attention backend for device {device} yet. Use --device cpu.")
        name = "cpu"
    if name == "cpu":
        if kind != "cpu":
            raise ConfigError(f"Attention backend cpu can't run on device {device}.")
        from octavo.attention.cpu import CpuAttention

        return CpuAttention()
    if name == "reference":
        from octavo.attention.reference import ReferenceAttention

        return ReferenceAttention()
    raise ConfigError(f"Unknown attention backend {name!r}; there are {', '.join(BACKENDS)}.")
