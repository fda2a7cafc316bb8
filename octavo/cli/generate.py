"""``octavo generate``: prompts in, texts or JSON lines out, through the offline ``LLM``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from octavo.cli import options, sampling_flags
from octavo.errors import ConfigError

DEFAULT_MAX_TOKENS = 256
_RECORD_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class Prompt:
    """One prompt: exactly one of text, token ids and messages. ``id`` is handed back with the result."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="Without any, standard input is the prompt.")
    parser.add_argument(
        "--input", metavar="FILE", help='JSON lines, "-" is standard input: a string, or {"prompt" | "prompt_token_ids" | "messages": …}.'
    )
    parser.add_argument("--chat", action="store_true", help="Take each prompt as a user's message, through the chat template.")
    parser.add_argument("--json", action="store_true", help="Print a JSON object a prompt: text, token ids, logprobs, finish reason.")
    options.add_log_level(parser)
    options.add_engine_flags(parser, exclude=("seed",))
    sampling_flags.add_sampling_flags(
        parser, defaults={"max_tokens": DEFAULT_MAX_TOKENS, "temperature": None, "top_p": None, "top_k": None}
    )


def run(args: argparse.Namespace) -> int:
    options.start_logging(args)
    chosen = {"max_tokens": DEFAULT_MAX_TOKENS} | sampling_flags.chosen(args)
    sampling_flags.build(chosen)  # complain before the model is loaded
    prompts = read_prompts(args)
    engine = options.engine_options(args)
    if engine.get("model") is None:
        print(options.DEMO_LINE, file=sys.stderr)
    options.check_engine(engine)
    from octavo.frontend.llm import LLM

    llm = LLM(**engine)
    defaults = llm.get_default_sampling_params() if hasattr(llm, "get_default_sampling_params") else None
    values = (defaults_of(defaults) if defaults is not None else {}) | chosen
    results = _generate(llm, prompts, sampling_flags.build(values))
    for line in (json_lines if args.json else text_lines)(prompts, results):
        print(line, flush=True)
    return 0


def defaults_of(params: Any) -> dict[str, Any]:
    """The model's recommended values: the fields in which ``params`` differs from plain ``SamplingParams()``."""
    plain = sampling_flags.SamplingParams()
    names = [name for name in plain.__struct_fields__ if getattr(params, name) != getattr(plain, name)]
    return {name: getattr(params, name) for name in names}


def _generate(llm: Any, prompts: list[Prompt], params: Any) -> list[Any]:
    """One call for the plain prompts and one for the conversations, so that each runs as one batch."""
    show = sys.stderr.isatty()
    results: list[Any] = [None] * len(prompts)
    plain = [i for i, p in enumerate(prompts) if p.messages is None]
    talks = [i for i, p in enumerate(prompts) if p.messages is not None]
    if plain:
        inputs = [prompts[i].text if prompts[i].text is not None else {"prompt_token_ids": prompts[i].token_ids} for i in plain]
        for i, output in zip(plain, llm.generate(inputs, params, use_tqdm=show), strict=True):
            results[i] = output
    if talks:
        for i, output in zip(talks, llm.chat([prompts[i].messages for i in talks], params, use_tqdm=show), strict=True):
            results[i] = output
    return results


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Prompts from the command line, then those of ``--input``, or else standard input. Raises ConfigError."""
    prompts = [Prompt(text=text) for text in args.prompts]
    if args.input == "-":
        prompts += parse_lines(sys.stdin, "standard input")
    elif args.input is not None:
        try:
            with open(args.input, encoding="utf-8") as file:
                prompts += parse_lines(file, args.input)
        except OSError as error:
            raise ConfigError(f"--input {args.input}: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--input {args.input}: not UTF-8 ({error}).") from error
    elif not prompts:
        if sys.stdin.isatty():
            raise ConfigError('No prompt given: octavo generate "Once upon a time", a pipe, or --input FILE.')
        prompts = [Prompt(text=sys.stdin.read())]
    if not prompts or any(p.text == "" for p in prompts):
        raise ConfigError("The prompt is empty.")
    if args.chat:
        prompts = [_as_chat(p) for p in prompts]
    return prompts


def _as_chat(prompt: Prompt) -> Prompt:
    if prompt.text is None:
        if prompt.token_ids is not None:
            raise ConfigError("--chat needs text: prompt_token_ids cannot go through the chat template.")
        return prompt
    return Prompt(messages=[{"role": "user", "content": prompt.text}], id=prompt.id)


def parse_lines(lines: Iterable[str], source: str) -> list[Prompt]:
    """JSON lines to prompts; an error names the line. Empty lines are skipped. Does not read files."""
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: not JSON ({error}).") from None
        prompts.append(_parse_record(record, f"{source}, line {number}"))
    return prompts


def _parse_record(record: Any, where: str) -> Prompt:
    if isinstance(record, str):
        return Prompt(text=record)
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a string or an object with one of {', '.join(_RECORD_KEYS)}.")
    given = [key for key in _RECORD_KEYS if key in record]
    unknown = [key for key in record if key not in (*_RECORD_KEYS, "id")]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; sampling is set by flags, for all prompts.")
    if len(given) != 1:
        raise ConfigError(f"{where}: needs exactly one of {', '.join(_RECORD_KEYS)}, got {len(given)}.")
    value = record[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: prompt must be a string.")
        return Prompt(text=value, id=record.get("id"))
    if given[0] == "prompt_token_ids":
        if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
            raise ConfigError(f"{where}: prompt_token_ids must be a list of integers.")
        return Prompt(token_ids=value, id=record.get("id"))
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ConfigError(f"{where}: messages must be a list of objects.")
    return Prompt(messages=value, id=record.get("id"))


def json_lines(prompts: list[Prompt], results: list[Any]) -> Iterable[str]:
    for prompt, result in zip(prompts, results, strict=True):
        record: dict[str, Any] = {} if prompt.id is None else {"id": prompt.id}
        record |= {"prompt": result.prompt, "prompt_token_ids": list(result.prompt_token_ids)}
        record["outputs"] = [asdict(output) for output in result.outputs]
        if result.prompt_logprobs is not None:
            record["prompt_logprobs"] = [p and {token: asdict(entry) for token, entry in p.items()} for p in result.prompt_logprobs]
        record["num_cached_tokens"] = result.num_cached_tokens
        yield json.dumps(record, ensure_ascii=False)


def text_lines(prompts: list[Prompt], results: list[Any]) -> Iterable[str]:
    """One text alone is printed as it is; several have a line before each that says whose it is."""
    single = len(results) == 1 and len(results[0].outputs) == 1
    for number, result in enumerate(results, 1):
        for output in result.outputs:
            if single:
                yield output.text
            else:
                yield f"### prompt {number}, output {output.index + 1} ({output.finish_reason})\n{output.text}\n"
