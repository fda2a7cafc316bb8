"""Parsers by name, and the choice by template."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.frontend.parsers import REASONING_PARSERS, TOOL_PARSERS, detect, make_parser
from octavo.frontend.parsers.registry import check_pair, markers_of, reasoning_parser_name, tool_parser_name

# The lines of the models' templates that write an assistant's calls.
QWEN25 = """{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}
{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
QWEN3 = QWEN25 + "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
CODER = "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + args_name + '>\\n' }}"
GLM = "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\\n<arg_value>{{ v }}</arg_value>{{- '\\n<think></think>' }}"
V3 = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']}}"
R1_FIRST = V3 + "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
R1 = R1_FIRST + "{{'<｜Assistant｜><think>\\n'}}"
MISTRAL = '{{- "[TOOL_CALLS] [" }}'
LLAMA31 = """{{- "<|start_header_id|>system<|end_header_id|>" }}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
HARMONY = '{{- "<|start|>assistant<|channel|>commentary json<|message|>" }}'


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        (QWEN25, "qwen2", ("hermes", None)),
        (QWEN3, "qwen3", ("hermes", "qwen3")),
        (CODER, "qwen3_moe", ("qwen3_coder", None)),
        (CODER + "<think>", "qwen3_5", ("qwen3_coder", "qwen3")),
        (GLM, "glm4_moe", ("glm", "glm")),
        (V3, "deepseek_v3", ("deepseek_v3", None)),
        (R1_FIRST, "qwen2", ("deepseek_v3", "qwen3")),
        (R1, "llama", ("deepseek_v3", "deepseek_r1")),
        (MISTRAL, "mistral", ("mistral", None)),
        (MISTRAL + "[THINK]", "mistral3", ("mistral", "mistral")),
        (LLAMA31, "llama", ("llama3_json", None)),
        (LLAMA31, "llama4", ("llama4_pythonic", None)),
        (HARMONY, "gpt_oss", ("gpt_oss", "gpt_oss")),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "llama", (None, None)),
        ("", "gpt_oss", ("gpt_oss", "gpt_oss")),
        (None, "llama", (None, None)),
    ],
)
def test_detect(template: str | None, model_type: str, expected: tuple[str | None, str | None]) -> None:
    found = detect(template, model_type)
    assert found == expected
    check_pair(*found)


def test_detect_by_architecture_where_nothing_else_is_known() -> None:
    assert detect(None, "", "Qwen3ForCausalLM") == ("hermes", "qwen3")


def test_names_and_aliases() -> None:
    assert tool_parser_name("glm45") == "glm" and reasoning_parser_name("openai_gptoss") == "gpt_oss"
    for name in TOOL_PARSERS:
        assert make_parser(name, None, tools=[{"name": "f"}]).markers == markers_of(name, None)
    for name in REASONING_PARSERS:
        assert make_parser(None, name).markers == markers_of(None, name)
    with pytest.raises(ConfigError, match="'herms'.*hermes"):
        make_parser("herms", None)
    with pytest.raises(ConfigError, match="--reasoning-parser 'r1'"):
        check_pair(None, "r1")
    with pytest.raises(ConfigError, match="exclude each other"):
        make_parser("gpt_oss", "qwen3")
