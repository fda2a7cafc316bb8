"""Parsers by name (``--tool-call-parser``, ``--reasoning-parser``), and which of them a model needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.frontend.parsers.base import ToolParser
from octavo.frontend.parsers.deepseek import DeepSeekV3Parser
from octavo.frontend.parsers.envelope import HermesParser, LlamaJsonParser, MistralParser
from octavo.frontend.parsers.forced import ForcedCallParser, ForcedCallsParser
from octavo.frontend.parsers.harmony import HarmonyParser
from octavo.frontend.parsers.markup import GlmParser, Qwen3CoderParser
from octavo.frontend.parsers.output_parser import OutputParser
from octavo.frontend.parsers.pythonic import Llama4PythonicParser
from octavo.frontend.parsers.reasoning import (
    Beginning,
    DeepSeekR1Reasoning,
    GlmReasoning,
    MistralReasoning,
    Qwen3Reasoning,
    ReasoningParser,
)
from octavo.frontend.parsers.schema import ToolSet

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "llama4_pythonic": Llama4PythonicParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "deepseek_v3": DeepSeekV3Parser,
    "glm": GlmParser,
    "gpt_oss": HarmonyParser,
}
REASONING_PARSERS: dict[str, type[ReasoningParser] | type[HarmonyParser]] = {
    "deepseek_r1": DeepSeekR1Reasoning,
    "qwen3": Qwen3Reasoning,
    "glm": GlmReasoning,
    "mistral": MistralReasoning,
    "gpt_oss": HarmonyParser,
}
# Names that users of other servers know.
_TOOL_ALIASES = {
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
    "qwen3_xml": "qwen3_coder",
    "deepseek_v31": "deepseek_v3",
    "glm45": "glm",
    "glm47": "glm",
    "openai": "gpt_oss",
    "harmony": "gpt_oss",
}
_REASONING_ALIASES = {"glm45": "glm", "openai_gptoss": "gpt_oss", "harmony": "gpt_oss"}

# model_type -> (tool parser, reasoning parser), for models that come without a chat template.
_BY_MODEL_TYPE: dict[str, tuple[str | None, str | None]] = {
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "deepseek_v3": ("deepseek_v3", None),
    "glm4_moe": ("glm", "glm"),
    "mistral": ("mistral", None),
    "mistral3": ("mistral", None),
    "ministral3": ("mistral", None),
    "mixtral": ("mistral", None),
    "llama4": ("llama4_pythonic", None),
    "qwen2": ("hermes", None),
    "qwen2_moe": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_moe": ("hermes", "qwen3"),
}


def tool_parser_name(name: str) -> str:
    """The parser's own name for ``name`` or an alias. ConfigError, with the list, for an unknown one."""
    return _named(name, TOOL_PARSERS, _TOOL_ALIASES, "--tool-call-parser")


def reasoning_parser_name(name: str) -> str:
    """The parser's own name for ``name`` or an alias. ConfigError, with the list, for an unknown one."""
    return _named(name, REASONING_PARSERS, _REASONING_ALIASES, "--reasoning-parser")


def _named(name: str, known: Mapping[str, Any], aliases: Mapping[str, str], flag: str) -> str:
    name = aliases.get(name, name)
    if name not in known:
        raise ConfigError(f"{flag} {name!r} is not known. Known: {', '.join(sorted([*known, *aliases]))}.")
    return name


def check_pair(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """ConfigError unless the two (names or aliases) are known and go together: harmony does both, and only with itself."""
    tool = tool_parser_name(tool_parser) if tool_parser is not None else None
    reasoning = reasoning_parser_name(reasoning_parser) if reasoning_parser is not None else None
    if "gpt_oss" in (tool, reasoning) and not {tool, reasoning} <= {"gpt_oss", None}:
        raise ConfigError(
            f"--tool-call-parser {tool_parser} and --reasoning-parser {reasoning_parser} exclude each other: "
            "gpt_oss splits off both reasoning and tool calls. Use it for both."
        )


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: ToolSet | Iterable[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    beginning: Beginning | None = None,
    whole_calls: bool = False,
) -> OutputParser:
    """A parser for one answer.

    ``tools``: those the request offers (None or empty, also for tool_choice "none": no text is a call). ``prompt``: the
    rendered prompt or its last characters, from which the reasoning parser knows how the answer begins; ``beginning``
    overrules it. ``whole_calls``: calls are passed on when they are whole. ConfigError for names; ValueError for tools
    without a name.
    """
    check_pair(tool_parser, reasoning_parser)
    tool_set = tools if isinstance(tools, ToolSet) else ToolSet(tools)
    tool_class = TOOL_PARSERS[tool_parser_name(tool_parser)] if tool_parser is not None else None
    reasoning_class = REASONING_PARSERS[reasoning_parser_name(reasoning_parser)] if reasoning_parser is not None else None
    if HarmonyParser in (tool_class, reasoning_class):
        return OutputParser(None, HarmonyParser(tool_set if tool_class else None), whole_calls=whole_calls)
    reasoning = None
    if reasoning_class is not None and issubclass(reasoning_class, ReasoningParser):
        reasoning = reasoning_class(prompt, beginning=beginning)
    return OutputParser(reasoning, tool_class(tool_set) if tool_class is not None and tool_set else None, whole_calls=whole_calls)


def make_forced_parser(
    name: str | None,
    reasoning_parser: str | None,
    *,
    tools: ToolSet | Iterable[Mapping[str, Any]],
    prompt: str | None = None,
    beginning: Beginning | None = None,
    whole_calls: bool = False,
) -> OutputParser:
    """A parser for an answer that a grammar forces to be the arguments of tool ``name``, or, with None, a list of calls.

    ConfigError for a reasoning parser that is unknown or is "gpt_oss", whose messages can't be such an answer: its own
    format must be forced, and `make_parser` reads it.
    """
    tool_set = tools if isinstance(tools, ToolSet) else ToolSet(tools)
    reasoning = None
    if reasoning_parser is not None:
        reasoning_class = REASONING_PARSERS[reasoning_parser_name(reasoning_parser)]
        if not issubclass(reasoning_class, ReasoningParser):
            raise ConfigError(f"--reasoning-parser {reasoning_parser} reads its own format of calls only; use make_parser.")
        reasoning = reasoning_class(prompt, beginning=beginning)
    calls = ForcedCallsParser(tool_set) if name is None else ForcedCallParser(tool_set, name)
    return OutputParser(reasoning, calls, whole_calls=whole_calls)


def markers_of(tool_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """The special tokens that the detokenizer must not skip, for these parsers to see them."""
    tool: tuple[str, ...] = TOOL_PARSERS[tool_parser_name(tool_parser)].markers if tool_parser is not None else ()
    reasoning = REASONING_PARSERS[reasoning_parser_name(reasoning_parser)].markers if reasoning_parser is not None else ()
    return tuple(dict.fromkeys((*tool, *reasoning)))


def detect(chat_template: str | None, model_type: str = "", architecture: str = "") -> tuple[str | None, str | None]:
    """(tool parser, reasoning parser) for a model, by the marks in its chat template, the most telling first.

    Without a template: by ``model_type`` (config.json's), or what ``architecture`` says. None where nothing is sure.
    """
    if not chat_template:
        return _BY_MODEL_TYPE.get(model_type) or _by_architecture(architecture)
    has = chat_template.__contains__
    thinks = has("<think>")
    if has("<|channel|>") and has("<|message|>"):
        return "gpt_oss", "gpt_oss"
    if has("<｜tool▁call▁begin｜>") or has("<｜tool▁calls▁begin｜>"):
        # The template of models that always think opens the block; that of V3 only cuts earlier thoughts off at </think>.
        return "deepseek_v3", "deepseek_r1" if thinks else ("qwen3" if has("</think>") else None)
    if has("[TOOL_CALLS]"):
        return "mistral", "mistral" if has("[THINK]") else ("qwen3" if thinks else None)
    if has("<arg_key>"):
        return "glm", "glm" if thinks or has("</think>") else None
    reasoning = _think_parser(chat_template)
    if has("<tool_call>") and has("<function="):
        return "qwen3_coder", reasoning
    if has("<tool_call>"):
        return "hermes", reasoning
    if has("<|python_start|>") or model_type == "llama4":
        return "llama4_pythonic", reasoning
    if has("<|python_tag|>") or (has("<|start_header_id|>") and has('"parameters"')):
        return "llama3_json", reasoning
    return None, reasoning


def _think_parser(chat_template: str) -> str | None:
    if "[THINK]" in chat_template:
        return "mistral"
    return "qwen3" if "<think>" in chat_template or "</think>" in chat_template else None


def _by_architecture(architecture: str) -> tuple[str | None, str | None]:
    return {
        "GptOssForCausalLM": ("gpt_oss", "gpt_oss"),
        "Glm4MoeForCausalLM": ("glm", "glm"),
        "DeepseekV3ForCausalLM": ("deepseek_v3", None),
        "Llama4ForConditionalGeneration": ("llama4_pythonic", None),
        "MistralForCausalLM": ("mistral", None),
        "Qwen3ForCausalLM": ("hermes", "qwen3"),
        "Qwen3MoeForCausalLM": ("hermes", "qwen3"),
    }.get(architecture, (None, None))
