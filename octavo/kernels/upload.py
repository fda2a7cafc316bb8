"""From the host to the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A (nested) list, or a CPU tensor, as a tensor on the device. To a GPU through pinned memory: an ordinary copy would
    make the host wait for all that is queued there."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
