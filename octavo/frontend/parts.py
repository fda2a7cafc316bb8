"""What a front end needs of a model besides its weights; the same for ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.frontend.chat_template import ChatTemplate, read_chat_template
from octavo.frontend.tokenizer import Tokenizer, load_tokenizer
from octavo.models.config import ModelConfig, read_model_config
from octavo.models.context import resolve_max_model_len
from octavo.models.hub import DEMO_SAMPLING_DEFAULTS, resolve_model


@dataclass(frozen=True)
class ModelParts:
    """``tokenizer`` and ``chat_template`` are None with --skip-tokenizer-init. ``max_model_len``: what was asked for, or the model's."""

    model_config: ModelConfig
    max_model_len: int
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def find_model(config: EngineConfig) -> str:
    """Local path of the configured model, downloaded if need be. Raises ModelError."""
    return resolve_model(config.model, revision=config.revision, download_dir=config.download_dir, load_format=config.load_format)


def load_model_parts(config: EngineConfig, path: str, chat_template: str | None = None) -> ModelParts:
    """Read configuration, tokenizer and chat template. ``chat_template``: a file or a template that replaces the model's.

    Raises ModelError and ConfigError, naming what cannot be used.
    """
    model_config = read_model_config(path, config.load_format)
    if config.generation_config in ("none", "vllm"):
        model_config = dataclasses.replace(model_config, generation_defaults={})
    elif config.model is None:
        model_config = dataclasses.replace(model_config, generation_defaults=DEMO_SAMPLING_DEFAULTS | model_config.generation_defaults)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    if config.skip_tokenizer_init:
        if chat_template is not None:
            raise ConfigError("--chat-template needs a tokenizer; leave out --skip-tokenizer-init.")
        return ModelParts(model_config, max_model_len, None, None)
    tokenizer = load_tokenizer(model_config.path, config.tokenizer, revision=config.revision, download_dir=config.download_dir)
    source = read_chat_template(chat_template) if chat_template is not None else tokenizer.chat_templates or None
    return ModelParts(model_config, max_model_len, tokenizer, ChatTemplate(source, tokenizer))
