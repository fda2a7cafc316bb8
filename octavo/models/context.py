"""How long a sequence may be."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.models.config import ModelConfig


def resolve_max_model_len(requested: int | None, model: ModelConfig) -> int:
    """``--max-model-len``, or the model's own limit. Raises ConfigError when more is asked than the model can do."""
    if requested is None:
        trained = model.pooling.max_length if model.pooling is not None else None
        return min(model.max_position, trained or model.max_position)
    if requested > model.max_position:
        raise ConfigError(
            f"--max-model-len {requested} is more than this model's {model.max_position} positions. "
            f"Use {model.max_position} or less, or give the model a rope_scaling in its config.json that reaches further."
        )
    return requested
