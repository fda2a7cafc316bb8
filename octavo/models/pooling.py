"""What makes a model an embedder: the pooling that its files describe, and what the server was told. Never imports torch.

Files are those that sentence-transformers writes beside a model (modules.json, 1_Pooling/config.json,
sentence_bert_config.json); a model without them pools as models of its kind do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.config_fields import Fields, read_json_object
from octavo.types import PoolingKind

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

KINDS: dict[str, PoolingKind] = {"mean": "mean", "last": "last", "lasttoken": "last", "cls": "cls"}
_MODES: dict[str, PoolingKind] = {  # fields of 1_Pooling/config.json
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_SUBFOLDER = re.compile(r"^[\w.-]+$")


@dataclass(frozen=True)
class PoolingConfig:
    """How a model's hidden states become one vector. ``max_length``: longest text in tokens, where the files say one."""

    kind: PoolingKind
    normalize: bool = True
    max_length: int | None = None


def read_pooling(folder: str | Path) -> PoolingConfig | None:
    """What sentence-transformers' files in ``folder`` say; None if there are none. ModelError for what cannot be done here."""
    folder = Path(folder)
    modules = folder / "modules.json"
    if not modules.is_file():
        return None
    kind: PoolingKind | None = None
    normalize = False
    for module in _module_list(modules):
        name = module.text("type").rpartition(".")[2]
        if name == "Pooling":
            kind = _pooling_kind(folder, module.text("path"))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise ModelError(f"{modules}: the module {name} is not supported; supported: Transformer, Pooling, Normalize.")
    if kind is None:
        return None
    return PoolingConfig(kind, normalize, _max_length(folder))


def _module_list(file: Path) -> list[Fields]:
    import json

    try:
        entries = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{file} must hold a list of objects.")
    return [Fields(entry, f"{file}, entry {i}") for i, entry in enumerate(entries)]


def _pooling_kind(folder: Path, path: str) -> PoolingKind:
    if not _SUBFOLDER.match(path) or path in (".", ".."):
        raise ModelError(f"{folder / 'modules.json'}: path {path!r} is not the name of a folder beside it.")
    file = folder / path / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has a modules.json, but {path}/config.json is missing; copy or download the model again.")
    config = Fields(read_json_object(file), str(file))
    named = config.values.get("pooling_mode")  # sentence-transformers 5 writes one name instead of flags
    modes = [named] if isinstance(named, str) else [n for n in config.values if n.startswith("pooling_mode_") and config.boolean(n, False)]
    kinds = [KINDS.get(mode) or _MODES.get(mode) for mode in modes]
    if len(kinds) != 1 or kinds[0] is None:
        raise ModelError(f"{file}: pooling by {', '.join(modes) or 'nothing'} is not supported; supported: {', '.join(_MODES)}.")
    return kinds[0]


def _max_length(folder: Path) -> int | None:
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json"):
        file = folder / name
        if file.is_file():
            config = Fields(read_json_object(file), str(file))
            return config.integer("max_seq_length") if config.has("max_seq_length") else None
    return None


@dataclass(frozen=True)
class Roles:
    """What a server does with its model: continue prompts, make vectors of them (``pooling``), or both."""

    generates: bool
    pooling: PoolingConfig | None

    def why_not_generate(self) -> str:
        return (
            "This server makes embeddings and does not generate text (--runner pooling); use /v1/embeddings, /v1/rerank or /v1/score, "
            "or ask a server that was started with a text model and --runner generate."
        )

    def why_not_embed(self) -> str:
        return "This server only generates text (--runner generate); start it with --runner pooling, or leave --runner out, for embeddings."


def resolve_roles(config: EngineConfig, model: ModelConfig) -> Roles:
    """--runner, --task, --convert and --pooler-config against what the model is.

    auto: encoders, models without an output head, and those with sentence-transformers' files embed; other decoders do both.
    Raises ConfigError for what the model cannot do.
    """
    asked = config.runner_asked
    embedder_only = model.encoder or model.headless
    if asked == "generate" and embedder_only:
        raise ConfigError(f"{model.architecture} makes embeddings and cannot generate text; leave out --runner generate.")
    if asked == "generate":
        if config.pooler_config is not None:
            raise ConfigError("--pooler-config says nothing with --runner generate; leave one of them out.")
        return Roles(True, None)
    pooling = model.pooling or PoolingConfig("mean" if model.encoder else "last")
    pooling = _overridden(pooling, config.pooler_options)
    if pooling.kind == "cls" and not model.encoder:
        raise ConfigError("CLS pooling takes the first token's state, which knows nothing of a decoder's text; use LAST or MEAN.")
    generates = asked != "pooling" and not embedder_only and model.pooling is None
    return Roles(generates, pooling)


def _overridden(pooling: PoolingConfig, options: dict[str, Any]) -> PoolingConfig:
    changes: dict[str, Any] = {}
    if "pooling_type" in options:
        changes["kind"] = KINDS[options["pooling_type"].lower()]
    if "normalize" in options:
        changes["normalize"] = options["normalize"]
    return replace(pooling, **changes)
