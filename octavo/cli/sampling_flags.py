"""Sampling flags out of the fields of ``SamplingParams``. Imports msgspec, so only commands that sample import this."""

from __future__ import annotations

import argparse
import json
import typing
from typing import Any

import msgspec

from octavo.cli.flags import Toggle, parse_float, parse_size
from octavo.config import flag_name
from octavo.errors import ConfigError, RequestError
from octavo.frontend.params import SamplingParams

_DEST = "sampling."  # keeps --seed of the request apart from the engine's option of that name

HELP = {
    "n": "Continuations per prompt.",
    "presence_penalty": "Lowers tokens that occurred in the output, -2 to 2.",
    "frequency_penalty": "Lowers tokens by how often they occurred in the output, -2 to 2.",
    "repetition_penalty": "Divides the logits of tokens that occurred in prompt or output; 1 is off.",
    "temperature": "0 always takes the likeliest token.",
    "top_p": "Keep the likeliest tokens that together have this probability.",
    "top_k": "Keep this many of the likeliest tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely, relative to the likeliest.",
    "seed": "The same prompt and seed give the same tokens.",
    "stop": "Text that ends the output and is left out of it; repeat the flag for several.",
    "stop_token_ids": "Token ids that end the output, separated by commas.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "max_tokens": "Most output tokens.",
    "min_tokens": "No end before this many output tokens.",
    "logprobs": "Also give the log-probabilities of this many likeliest tokens (--json).",
    "prompt_logprobs": "The same for the prompt's tokens (--json).",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens in the text.",
    "include_stop_str_in_output": "Leave the stop text in the output.",
    "truncate_prompt_tokens": "Keep only the last this many tokens of a prompt.",
    "bad_words": "Text that is never generated; repeat the flag for several.",
    "allowed_token_ids": "Generate only these token ids, separated by commas.",
    "logit_bias": 'Added to logits, as JSON: {"token id": number}, -100 to 100.',
    "structured_outputs": 'The form of the output, as JSON with one of json, regex, choice, grammar: {"choice": ["yes", "no"]}.',
}
WITHOUT_FLAG = {"detokenize", "kept_special_tokens"}  # the commands print text, and parse none
_IDS = {"stop_token_ids", "allowed_token_ids"}
_TEXTS = {"stop", "bad_words"}
_METAVARS: dict[Any, str] = {int: "N", float: "X"}


def add_sampling_flags(parser: argparse.ArgumentParser, *, exclude: tuple[str, ...] = (), defaults: dict[str, Any] | None = None) -> None:
    """Add the group "Sampling". ``defaults`` are named in the help where a command's own differ from the dataclass's."""
    group = parser.add_argument_group("Sampling")
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in WITHOUT_FLAG or field.name in exclude:
            continue
        default = (defaults or {}).get(field.name, field.default)
        text = HELP[field.name].replace("%", "%%")
        if isinstance(default, bool):
            text += f" (default: {'on' if default else 'off'})"
        elif isinstance(default, (int, float, str)):
            text += f" (default: {default})"
        kwargs: dict[str, Any] = {"dest": _DEST + field.name, "default": argparse.SUPPRESS, "help": text}
        group.add_argument(flag_name(field.name), **kwargs, **_action(field.name, field.type))


def _action(name: str, annotation: Any) -> dict[str, Any]:
    if name in _IDS:
        return {"action": "extend", "type": _parse_ids, "metavar": "ID,ID"}
    if name in _TEXTS:
        return {"action": "append", "metavar": "TEXT"}
    if name == "logit_bias":
        return {"type": _parse_bias, "metavar": "JSON"}
    if name == "structured_outputs":
        return {"type": _parse_object, "metavar": "JSON"}
    base = next((a for a in typing.get_args(annotation) if a is not type(None)), annotation)
    if base is bool:
        return {"action": Toggle}
    return {"type": {int: parse_size, float: parse_float}[base], "metavar": _METAVARS[base]}


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling values that the user wrote, by field name."""
    return {name[len(_DEST) :]: value for name, value in vars(args).items() if name.startswith(_DEST)}


def build(values: dict[str, Any]) -> SamplingParams:
    """``SamplingParams`` from flags; a value out of range is a ConfigError, as for every other flag."""
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(f"{flag_name(error.param)}: {error}" if error.param else str(error)) from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def _parse_bias(text: str) -> dict[int, float]:
    try:
        data = json.loads(text)
        return {int(token): float(bias) for token, bias in data.items()}
    except (ValueError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"17": -100}}') from None


def _parse_object(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return data
