"""Where prompts come from: made at random to a length, verse, groups with common prefixes, or files.

``make_prompts`` is the way in. The files' parsers take lines, and do no I/O.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from octavo.bench.options import DatasetOptions
from octavo.bench.tokens import FIRST_TOKEN_ID, Counter, TextMaker, all_alike, asked
from octavo.bench.words import POEM_TASK, verse
from octavo.errors import ConfigError

T = TypeVar("T")
ALIKE = "This model's tokenizer makes the same token of most words, or none, so all texts would be one prompt."
DEFAULT_VOCAB = 32000  # of a server that cannot be asked: nearly every model has as many
DEFAULT_CUSTOM_OUTPUT_LEN = 256
COUNTING_AT_ONCE = 16
# What ShareGPT's users leave out: turns too short to be any, and too long for a small context.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
_OUTPUT_KEYS = ("output_len", "output_tokens", "max_tokens")


@dataclass(frozen=True)
class Prompt:
    """What to ask. ``content``: a text, or token ids. ``input_len``: its tokens where they were counted.

    ``output_len`` None: as long as the answer in the file, whose text is then ``answer``.
    """

    content: str | list[int]
    output_len: int | None
    input_len: int | None = None
    answer: str | None = None


async def make_prompts(
    options: DatasetOptions, count: int, seed: int, counter: Counter | None, *, ids_allowed: bool = True
) -> list[Prompt]:
    """``count`` prompts. ``counter`` counts tokens; without one, prompts are token ids, if ``ids_allowed`` (no chat).

    Raises ConfigError for files that can't be read and for what needs a counter.
    """
    rng = random.Random(seed)
    if options.dataset_name in ("sharegpt", "custom"):
        return await _from_file(options, count, rng, counter)
    if options.dataset_name == "sonnet":
        return await _sonnet(options, count, rng, counter)
    lengths, prefixes = _shape(options, count, rng)
    if counter is not None and options.prompt_format != "token-ids":
        maker = await TextMaker.create(counter, rng)
        if maker is not None:
            return await _texts(lengths, prefixes, rng, maker)
        if options.prompt_format == "text" or not ids_allowed:
            raise ConfigError(
                f"{ALIKE} Use --dataset-name custom, or send token ids: --endpoint /v1/completions --prompt-format token-ids."
            )
        print(f"{ALIKE} Token ids are sent instead.", file=sys.stderr, flush=True)
    elif options.prompt_format == "text":
        raise ConfigError("--prompt-format text needs a way to count tokens: this server has no /tokenize. Give --tokenizer FOLDER.")
    if not ids_allowed:
        raise ConfigError(
            "Prompts of an exact length need a way to count tokens: this server has no /tokenize. "
            "Give --tokenizer FOLDER, or ask /v1/completions, which takes token ids."
            if counter is None
            else "--prompt-format token-ids: chats are text; use --endpoint /v1/completions."
        )
    return _token_ids(lengths, prefixes, rng, (await counter.vocab_size() if counter else None) or DEFAULT_VOCAB)


@dataclass(frozen=True)
class _Length:
    """One prompt's shape: the group whose prefix it has, tokens in all, and of the output."""

    group: int
    input_len: int
    output_len: int


def _shape(options: DatasetOptions, count: int, rng: random.Random) -> tuple[list[_Length], list[int]]:
    """The prompts' lengths, and the prefix's length for each group."""
    if options.dataset_name == "random":
        prefix, n_in, n_out = options.random_prefix_len, options.input_len or options.random_input_len, options.random_output_len
        n_out, ratio = options.output_len or n_out, options.random_range_ratio
        lengths = [_Length(0, prefix + spread(rng, n_in, ratio), spread(rng, n_out, ratio)) for _ in range(count)]
        return lengths, [prefix]
    prefix, n_out = options.prefix_repetition_prefix_len, options.output_len or options.prefix_repetition_output_len
    total = options.input_len or prefix + options.prefix_repetition_suffix_len
    if total <= prefix:
        raise ConfigError(f"--input-len {total} must be more than --prefix-repetition-prefix-len {prefix}.")
    groups = options.prefix_repetition_num_prefixes
    lengths = [_Length(i % groups, total, n_out) for i in range(count)]
    rng.shuffle(lengths)
    return lengths, [prefix] * groups


def spread(rng: random.Random, length: int, ratio: float) -> int:
    """Uniform from ``length·(1-ratio)`` to ``length·(1+ratio)``, both rounded inward, at least 1."""
    low, high = -int(-length * (1 - ratio) // 1), int(length * (1 + ratio))
    return rng.randint(max(low, 1), max(high, 1))


def _token_ids(lengths: list[_Length], prefixes: list[int], rng: random.Random, vocab: int) -> list[Prompt]:
    low = min(FIRST_TOKEN_ID, vocab // 2)

    def some(count: int) -> list[int]:
        return [low + int(rng.random() * (vocab - low)) for _ in range(count)]

    common = [some(n) for n in prefixes]
    return [Prompt(common[x.group] + some(x.input_len - prefixes[x.group]), x.output_len, x.input_len) for x in lengths]


async def _texts(lengths: list[_Length], prefixes: list[int], rng: random.Random, maker: TextMaker) -> list[Prompt]:
    common = [await maker.prefix(rng, n) for n in prefixes]
    seeds = [rng.getrandbits(64) for _ in lengths]  # each its own randomness, whatever order the answers come in

    async def one(i: int) -> Prompt:
        length = lengths[i]
        text = await maker.text(random.Random(seeds[i]), length.input_len, common[length.group])
        return Prompt(text, length.output_len, length.input_len)

    return await _several(one, range(len(lengths)))


async def _several(work: Callable[[int], Awaitable[T]], items: Iterable[int]) -> list[T]:
    """``work`` for every item, a few at once; results in order."""
    gate = asyncio.Semaphore(COUNTING_AT_ONCE)

    async def guarded(item: int) -> T:
        async with gate:
            return await work(item)

    return list(await asyncio.gather(*(guarded(item) for item in items)))


async def _sonnet(options: DatasetOptions, count: int, rng: random.Random, counter: Counter | None) -> list[Prompt]:
    n_in, n_out = options.input_len or options.sonnet_input_len, options.output_len or options.sonnet_output_len
    if options.sonnet_prefix_len >= n_in:
        raise ConfigError(f"--sonnet-prefix-len {options.sonnet_prefix_len} must be less than --sonnet-input-len {n_in}.")
    lines = [verse(rng) for _ in range(64)]
    per_line, task = 13.0, 16.0  # about what tokenizers make of them
    if counter is not None:
        if await all_alike(counter, "".join(lines)):
            raise ConfigError(f"{ALIKE} Use --dataset-name random.")
        task = float(await asked(counter.count, POEM_TASK))
        per_line = (await asked(counter.count, POEM_TASK + "".join(lines)) - task) / len(lines)
    if n_in < task + per_line:
        raise ConfigError(f"--sonnet-input-len {n_in} is too short: the task and one line of verse take {task + per_line:.0f} tokens.")
    common = max(round((options.sonnet_prefix_len - task) / per_line), 0)
    rest = max(round((n_in - task) / per_line) - common, 1)
    prefix = POEM_TASK + "".join(lines[i % len(lines)] for i in range(common))
    poems = [[verse(rng) for _ in range(2 * rest + 1)] for _ in range(count)]

    async def one(i: int) -> Prompt:
        size, text = rest, prefix + "".join(poems[i][:rest])
        if counter is not None:  # lines differ in length: put right what is more than half a line
            size += round((n_in - await asked(counter.count, text)) / per_line)
            text = prefix + "".join(poems[i][: max(size, 1)])
        return Prompt(text, n_out)

    return await _several(one, range(count))


async def _from_file(options: DatasetOptions, count: int, rng: random.Random, counter: Counter | None) -> list[Prompt]:
    path = str(options.dataset_path)
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors put a mark at the beginning
            text = file.read()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path {path}: not UTF-8 ({error}).") from error
    found = list(parse_records(text, path))
    if not options.disable_shuffle:
        rng.shuffle(found)
    prompts: list[Prompt] = []
    for start in range(0, len(found), max(count, 1)):  # as many as are needed: counting each costs a request or two
        batch = found[start : start + count]
        sized = await _several(lambda i, batch=batch: _sized(batch[i], options, counter), range(len(batch)))  # type: ignore[misc]
        prompts += [p for p in sized if p is not None]
        if len(prompts) >= count:
            break
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: no usable prompt in it (of {len(found)}; those of a very unusual length are left out).")
    return [prompts[i % len(prompts)] for i in range(count)]


async def _sized(prompt: Prompt, options: DatasetOptions, counter: Counter | None) -> Prompt | None:
    """With its lengths; None for a conversation that ShareGPT's users leave out."""
    wanted = options.output_len or (options.sharegpt_output_len if prompt.answer is not None else options.custom_output_len)
    if prompt.answer is None:
        return replace(prompt, output_len=options.output_len or prompt.output_len or wanted or DEFAULT_CUSTOM_OUTPUT_LEN)
    if counter is None:
        if wanted is None:
            raise ConfigError(
                "The file's answers cannot be counted: the server has no /tokenize. "
                "Give --tokenizer FOLDER or --sharegpt-output-len TOKENS."
            )
        return replace(prompt, output_len=wanted)
    n_in = await asked(counter.count, str(prompt.content))
    n_out = wanted or await asked(counter.count, prompt.answer)
    if n_in < MIN_TOKENS or (wanted is None and n_out < MIN_TOKENS) or n_in > MAX_PROMPT_TOKENS or n_in + n_out > MAX_TOTAL_TOKENS:
        return None
    return replace(prompt, input_len=n_in if counter.exact else None, output_len=n_out)


def parse_records(text: str, source: str) -> Iterator[Prompt]:
    """A JSON array or JSON lines of ``{"conversations": …}`` (ShareGPT) or ``{"prompt": …, "output_len": …}``.

    Of a conversation, the first two turns are the prompt and the answer; those with fewer are skipped. Raises ConfigError
    naming the place.
    """
    for where, record in _records(text, source):
        if not isinstance(record, dict):
            raise ConfigError(f'{where}: must be an object with "conversations" or "prompt".')
        if "conversations" in record or "conversation" in record:
            turns = record.get("conversations", record.get("conversation")) or []
            if not isinstance(turns, list):
                raise ConfigError(f"{where}: a conversation must be a list of turns.")
            values = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2]]
            if len(values) == 2 and all(isinstance(value, str) and value for value in values):
                yield Prompt(values[0], None, answer=values[1])
        else:
            yield _prompt_record(record, where)


def _prompt_record(record: dict[str, Any], where: str) -> Prompt:
    unknown = [key for key in record if key not in ("prompt", "id", *_OUTPUT_KEYS)]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are prompt, output_len and id.")
    content = record.get("prompt")
    is_ids = isinstance(content, list) and bool(content) and all(type(token) is int for token in content)
    if not (isinstance(content, str) and content) and not is_ids:
        raise ConfigError(f"{where}: prompt must be a text or a list of token ids, and not empty.")
    given = [record[key] for key in _OUTPUT_KEYS if record.get(key) is not None]
    if len(given) > 1 or any(type(n) is not int or n < 1 for n in given):
        raise ConfigError(f"{where}: output_len must be one whole number of at least 1.")
    return Prompt(content, given[0] if given else None, len(content) if is_ids else None)  # type: ignore[arg-type]


def _records(text: str, source: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not JSON ({error}).") from None
        yield from ((f"{source}, entry {i}", record) for i, record in enumerate(data, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{source}, line {number}: not JSON ({error}).") from None
            yield f"{source}, line {number}", record
