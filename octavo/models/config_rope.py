"""Rotary embedding settings out of a checkpoint's configuration, in any of the spellings that are around.

Semantics are those of Hugging Face's ``modeling_rope_utils``. Papers: linear (kaiokendev's "SuperHOT"), dynamic NTK
(bloc97), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753); ``llama3`` comes with Llama 3.1.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import RopeConfig
from octavo.models.config_fields import Fields

DEFAULT_THETA = 10000.0
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_RENAMED = {"su": "longrope"}  # LongRoPE's name in the first Phi-3 checkpoints
_EVERYWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "original_max_position_embeddings"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"},
}


def read_rope(config: Fields, *, head_dim: int, max_position: int) -> tuple[RopeConfig, int]:
    """(rotary settings, longest context with scaling counted).

    Reads ``rope_parameters`` (transformers 5), else ``rope_theta`` with ``rope_scaling`` (before; key ``type`` or
    ``rope_type``). ``max_position`` is the checkpoint's ``max_position_embeddings``.

    ``parameters`` of the result hold every number that the kind needs, defaults filled in: ``factor`` for all scaled
    kinds and ``original_max_position_embeddings`` for all but linear.
    """
    section = config.object("rope_parameters") or config.object("rope_scaling") or Fields({}, config.where)
    _refuse_per_layer(config, section)
    kind = section.text("rope_type", section.text("type", "default"))
    kind = _RENAMED.get(kind, kind)
    if kind not in _KINDS:
        raise section.error("rope_type", f"is {kind!r}, which is not supported; supported: {', '.join(_KINDS)}")
    _refuse_unknown(section, kind)

    theta = section.number("rope_theta", config.number("rope_theta", DEFAULT_THETA, above=0), above=0)
    share = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0, above=0), above=0)
    rotary_dim = int(head_dim * share + 1e-6)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise config.error(
            "partial_rotary_factor", f"of {share:g} rotates {rotary_dim} of {head_dim} dimensions; an even part of them is needed"
        )

    # Phi-3 and others keep the trained length beside the section; Hugging Face gives that one priority.
    outer = config.integer("original_max_position_embeddings", 0, minimum=0)
    original = outer or section.integer("original_max_position_embeddings", max_position)
    has_original = outer > 0 or section.has("original_max_position_embeddings")
    parameters = _parameters(section, kind, rotary_dim, original, max_position)
    rope = RopeConfig(theta=theta, kind=kind, rotary_dim=rotary_dim, parameters=parameters)
    return rope, _longest_context(kind, parameters, original if has_original else max_position, max_position)


def _longest_context(kind: str, parameters: dict[str, Any], trained: int, max_position: int) -> int:
    """Where checkpoints mean different things by ``max_position_embeddings``.

    linear, dynamic, yarn: the trained length, which scaling stretches by ``factor`` (or the stretched one, with the
    trained one beside it: the product is the same). llama3, longrope: it is the stretched length already.
    """
    if kind in ("linear", "dynamic", "yarn"):
        return round(trained * parameters["factor"])
    return max_position


def _parameters(section: Fields, kind: str, rotary_dim: int, original: int, max_position: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind == "default":
        return found
    if kind != "linear":
        found["original_max_position_embeddings"] = max_position if kind == "dynamic" else original
    if kind in ("yarn", "longrope") and not section.has("factor"):
        found["factor"] = max_position / original
    else:
        found["factor"] = section.number("factor", above=0)
    if kind == "llama3":
        found["low_freq_factor"] = section.number("low_freq_factor", above=0)
        found["high_freq_factor"] = section.number("high_freq_factor", above=0)
    if kind == "longrope":
        found["short_factor"] = section.numbers("short_factor", rotary_dim // 2)
        found["long_factor"] = section.numbers("long_factor", rotary_dim // 2)
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"):
        if section.has(name):
            found[name] = section.number(name)
    if section.has("truncate"):
        found["truncate"] = section.boolean("truncate", True)
    return found


def _refuse_unknown(section: Fields, kind: str) -> None:
    for name in section.values:
        if section.has(name) and name not in _EVERYWHERE and not any(name in keys for keys in _KEYS.values()):
            raise section.error(name, f"is not supported for rope type {kind!r}; supported: {', '.join(sorted(_KEYS[kind])) or 'none'}")
        # A number that belongs to another kind is no reason to refuse: tools leave such remains behind.


def _refuse_per_layer(config: Fields, section: Fields) -> None:
    nested = [name for name in ("full_attention", "sliding_attention", "chunked_attention") if section.has(name)]
    if nested:
        raise config.error(
            "rope_parameters", f"differs per kind of layer ({', '.join(nested)}), which is not supported; one flat object is"
        )
