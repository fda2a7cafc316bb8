"""Prompts: exact lengths, prefixes, files of both formats, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.datasets import Prompt, make_prompts, parse_records, spread
from octavo.bench.http import HttpError
from octavo.bench.options import DatasetOptions, LoadOptions
from octavo.bench.tokens import LocalCounter, TextMaker
from octavo.bench.words import verse
from octavo.errors import ConfigError, OctavoError
from octavo.server.mock import FakeTokenizer


class Counter:
    """Words are one token, those with an x three; ``around`` tokens are put around every text."""

    exact = True

    def __init__(self, around: int = 0, words: list[str] | None = None) -> None:
        self.around, self._words, self.calls = around, words or [], 0

    async def count(self, text: str) -> int:
        self.calls += 1
        return self.around + sum(3 if "x" in word else 1 for word in text.split())

    async def words(self, rng: random.Random) -> list[str]:
        return self._words

    async def token_ids(self, text: str) -> list[int]:
        return [sum(word.encode()) for word in text.split()]

    async def vocab_size(self) -> int | None:
        return 500


def make(count: int = 8, counter: Any = None, seed: int = 0, ids_allowed: bool = True, **options: Any) -> list[Prompt]:
    return asyncio.run(make_prompts(DatasetOptions(**options), count, seed, counter, ids_allowed=ids_allowed))


def counted(counter: Any, prompt: Prompt) -> int:
    return asyncio.run(counter.count(prompt.content))


@pytest.mark.parametrize("around", [0, 1, 23])
@pytest.mark.parametrize("words", [[], [f"w{i}" for i in range(40)], [f"w{i}" + "x" * (i % 2) for i in range(60)]])
def test_random_texts_have_the_exact_length(around: int, words: list[str]) -> None:
    counter = Counter(around, words)
    prompts = make(30, counter, random_input_len=60, random_output_len=9, random_range_ratio=0.5)
    assert all(counted(counter, p) == p.input_len for p in prompts)
    assert all(30 <= p.input_len <= 90 and 5 <= p.output_len <= 13 for p in prompts)  # type: ignore[operator]
    assert len({p.content for p in prompts}) == 30


def test_exact_with_a_real_kind_of_tokenizer() -> None:
    """Bytes, and a few words: what is not a word of its vocabulary is many tokens."""

    class Tokenizer(FakeTokenizer):
        special_token_ids = frozenset(range(256, 259))

    counter = LocalCounter(Tokenizer())
    prompts = make(20, counter, random_input_len=50, random_range_ratio=0.3)
    assert [counted(counter, p) for p in prompts] == [p.input_len for p in prompts]
    with_few_words = TextMaker(counter, [])
    for tokens in (20, 101, 200):
        text = asyncio.run(with_few_words.text(random.Random(tokens), tokens))
        assert asyncio.run(counter.count(text)) == tokens


class WordLevel:
    """A tokenizer of whole words, as scripts/gpu/model_folders.py writes it: what it doesn't know is token 0."""

    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab: list[str]) -> None:
        self.vocab, self.vocab_size = {word: i for i, word in enumerate(vocab)}, len(vocab)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.vocab.get(word, 0) for word in text.split()]

    def token_bytes(self, token_id: int) -> bytes:
        return list(self.vocab)[token_id].encode()


def test_words_of_a_tokenizer_without_english_are_its_own() -> None:
    tokenizer = WordLevel(["<unk>", *(f"w{i}" for i in range(300))])
    prompts = make(30, LocalCounter(tokenizer), random_input_len=40)
    ids = [tokenizer.encode(str(p.content)) for p in prompts]
    assert all(len(i) == 40 and 0 not in i for i in ids) and len({tuple(i) for i in ids}) == 30


def test_prompts_that_would_all_be_the_same_tokens_are_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    counter = LocalCounter(WordLevel(["<unk>", *(f"<{i}>" for i in range(300))]))
    prompts = make(30, counter, random_input_len=40)
    assert all(isinstance(p.content, list) and len(set(p.content)) > 20 and len(p.content) == 40 for p in prompts)
    assert "Token ids are sent instead" in capsys.readouterr().err
    for options in ({"prompt_format": "text"}, {"ids_allowed": False}, {"dataset_name": "sonnet"}):
        with pytest.raises(ConfigError, match="all texts would be one prompt"):
            make(3, counter, **options)


@pytest.mark.parametrize(
    ("dataset", "option", "owner"),
    [
        ("sonnet", "random_input_len", "random"),
        ("random", "sonnet_prefix_len", "sonnet"),
        ("random", "prefix_repetition_num_prefixes", "shared-prefix"),
        ("shared-prefix", "custom_output_len", "custom"),
        ("random", "sharegpt_output_len", "sharegpt"),
    ],
)
def test_flags_of_another_dataset_are_refused(dataset: str, option: str, owner: str) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is for --dataset-name {owner}, not for {dataset}"):
        DatasetOptions(dataset_name=dataset, **{option: 7})


def test_negative_seeds_are_refused() -> None:
    """-1 would be 1."""
    with pytest.raises(ConfigError, match="--seed must be at least 0"):
        LoadOptions(seed=-1)


def test_tokens_that_cannot_be_seen_are_taken_to_differ() -> None:
    class Blind(Counter):
        async def token_ids(self, text: str) -> list[int]:
            return []

    assert all(isinstance(p.content, str) for p in make(3, Blind(), random_input_len=40))


@pytest.mark.parametrize("around", [0, 2])
def test_words_of_no_tokens(around: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer without <unk> leaves out what it doesn't know: no text gets longer by such words."""

    class Deaf(Counter):
        async def count(self, text: str) -> int:
            return self.around

        async def token_ids(self, text: str) -> list[int]:
            return []

    prompts = make(3, Deaf(around), random_input_len=40)
    assert all(isinstance(p.content, list) and len(p.content) == 40 for p in prompts)
    assert "or none" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="or none.*--prompt-format token-ids"):
        make(3, Deaf(around), prompt_format="text", random_input_len=40)
    with pytest.raises(ConfigError, match="or none.*--dataset-name random"):
        make(3, Deaf(around), dataset_name="sonnet")


def test_a_length_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="No text of 20 tokens"):
        make(1, Counter(around=30), random_input_len=20)


def test_token_ids_without_a_counter() -> None:
    prompts = make(20, random_input_len=33, random_prefix_len=7, input_len=40)
    assert all(isinstance(p.content, list) and len(p.content) == p.input_len == 47 for p in prompts)
    assert len({tuple(p.content[:7]) for p in prompts}) == 1 and len({tuple(p.content[7:14]) for p in prompts}) == 20
    assert all(100 <= token < 32000 for p in prompts for token in p.content)  # type: ignore[operator]
    small = make(20, Counter(), prompt_format="token-ids", random_input_len=50)
    assert max(token for p in small for token in p.content) < 500  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ids_allowed": False}, "--tokenizer"),
        ({"ids_allowed": False, "prompt_format": "token-ids", "counter": Counter()}, "chats are text"),
        ({"prompt_format": "text"}, "--tokenizer"),
        ({"dataset_name": "shared-prefix", "input_len": 100}, "must be more than --prefix-repetition-prefix-len 256"),
        ({"dataset_name": "sonnet", "sonnet_prefix_len": 600}, "must be less"),
        ({"dataset_name": "sonnet", "sonnet_prefix_len": 0, "sonnet_input_len": 9}, "too short"),
        ({"dataset_name": "custom"}, "needs --dataset-path"),
        ({"dataset_name": "random", "dataset_path": "x"}, "not for random"),
        ({"dataset_name": "custom", "dataset_path": "/nonexistent/file.jsonl"}, "/nonexistent/file.jsonl: No such file"),
        ({"dataset_name": "custom", "dataset_path": "x", "input_len": 3}, "--input-len"),
        ({"dataset_name": "rnd"}, "--dataset-name must be one of"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"random_input_len": 0}, "--random-input-len must be at least 1"),
        ({"random_prefix_len": -1}, "--random-prefix-len must be at least 0"),
    ],
)
def test_refusals(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**kwargs)


@given(st.integers(1, 5000), st.floats(0, 0.999), st.integers(0, 99))
def test_lengths_stay_in_their_range(length: int, ratio: float, seed: int) -> None:
    value = spread(random.Random(seed), length, ratio)
    assert 1 <= value and length * (1 - ratio) - 1e-6 <= value <= max(length * (1 + ratio) + 1e-6, 1)


def test_lengths_use_their_range() -> None:
    values = [spread(random.Random(i), 10, 0.5) for i in range(300)]
    assert set(values) == set(range(5, 16))


@pytest.mark.parametrize("counter", [None, Counter(around=2)])
def test_shared_prefixes(counter: Counter | None) -> None:
    sizes: dict[str, Any] = {"prefix_repetition_prefix_len": 20, "prefix_repetition_suffix_len": 10, "prefix_repetition_num_prefixes": 3}
    prompts = make(30, counter, dataset_name="shared-prefix", output_len=4, **sizes)
    units = [p.content.split() if isinstance(p.content, str) else p.content for p in prompts]
    groups = [tuple(unit[:20]) for unit in units]
    assert sorted(groups.count(g) for g in set(groups)) == [10, 10, 10]
    assert groups[:3] != groups[3:6] or groups != groups[:3] * 10  # shuffled, not one after the other
    assert len({tuple(unit) for unit in units}) == 30
    assert all(p.output_len == 4 and p.input_len == 30 for p in prompts)
    if counter is not None:
        assert all(counted(counter, p) == 30 for p in prompts)


def test_sonnet() -> None:
    counter = Counter()
    prompts = make(10, counter, dataset_name="sonnet")
    assert all(abs(counted(counter, p) - 550) < 12 for p in prompts) and all(p.output_len == 150 for p in prompts)
    texts = [str(p.content) for p in prompts]
    common = min(next(i for i, (a, b) in enumerate(zip(texts[0], t, strict=False)) if a != b) for t in texts[1:])
    assert abs(asyncio.run(counter.count(texts[0][:common])) - 200) < 30
    assert verse(random.Random(1)) == verse(random.Random(1)) and "\n" in verse(random.Random(1))


def test_seeds() -> None:
    for counter in (None, Counter()):
        assert make(5, counter, seed=3) == make(5, counter, seed=3) != make(5, counter, seed=4)


TALK = {
    "id": "a",
    "conversations": [{"from": "human", "value": "one two three four"}, {"from": "gpt", "value": "five ten seven eight nine"}],
}
SHORT = {"conversations": [{"from": "human", "value": "one two three four"}]}
LONG = {"conversations": [{"from": "human", "value": "w " * 1025}, {"from": "gpt", "value": "five ten seven eight"}]}


def write(path: Path, records: list[Any], *, lines: bool) -> str:
    text = "\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) if lines else json.dumps(records)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("lines", [True, False])
def test_sharegpt(tmp_path: Path, lines: bool) -> None:
    path = write(tmp_path / "f.json", [TALK, SHORT, LONG], lines=lines)
    prompts = make(3, Counter(), dataset_name="sharegpt", dataset_path=path)
    assert [(p.content, p.input_len, p.output_len) for p in prompts] == [("one two three four", 4, 5)] * 3  # the others are left out
    prompts = make(2, None, dataset_name="sharegpt", dataset_path=path, sharegpt_output_len=77, disable_shuffle=True)
    assert [p.output_len for p in prompts] == [77, 77] and str(prompts[1].content).startswith("w w")
    with pytest.raises(ConfigError, match="--sharegpt-output-len"):
        make(1, None, dataset_name="sharegpt", dataset_path=path)


@pytest.mark.parametrize("lines", [True, False])
def test_prompt_lines(tmp_path: Path, lines: bool) -> None:
    records = [{"prompt": "a\u2028b", "output_len": 3}, {"prompt": [1, 2], "id": 7}, {"prompt": "c", "output_tokens": 4}]
    path = write(tmp_path / "f.jsonl", records, lines=lines)
    prompts = make(4, None, dataset_name="custom", dataset_path=path, disable_shuffle=True, custom_output_len=9)
    assert [(p.content, p.output_len) for p in prompts] == [("a\u2028b", 3), ([1, 2], 9), ("c", 4), ("a\u2028b", 3)]
    assert make(1, None, dataset_name="custom", dataset_path=path, disable_shuffle=True, output_len=5)[0].output_len == 5
    orders = {tuple(str(p.content) for p in make(3, None, seed=s, dataset_name="custom", dataset_path=path)) for s in range(9)}
    assert len(orders) > 1 and all(len(set(order)) == 3 for order in orders)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{', "f, line 2: not JSON"),
        ('["a"', "f: not JSON"),
        ('["a"]', "f, entry 1: must be an object"),
        ('{"prompt": "a", "ouput_len": 3}', "unknown key 'ouput_len'"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": ["a"]}', "list of token ids"),
        ('{"prompt": "a", "output_len": 0}', "output_len"),
        ('{"prompt": "a", "output_len": 3, "max_tokens": 4}', "output_len"),
        ('{"conversations": 5}', "f, line 1: a conversation must be a list of turns"),
        ('{"prompt": "a"}\n{"conversations": {"value": "a"}}', "f, line 2: a conversation must be a list of turns"),
        ("[" * 100_000, "f: not JSON"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(parse_records(text, "f"))
    assert message in str(error.value)


def test_odd_conversations_are_left_out(tmp_path: Path) -> None:
    odd = [None, [], [1, 2], ["a", "b"], [{"value": None}, {"value": "b"}], [{"value": 3}, {"value": 4}], [{"value": ""}] * 2]
    records = [{"conversations": turns} for turns in odd]
    path = write(tmp_path / "f.json", [*records, TALK], lines=False)
    assert [p.content for p in make(2, Counter(), dataset_name="sharegpt", dataset_path=path)] == ["one two three four"] * 2


def test_a_mark_at_the_beginning_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('\ufeff{"prompt": "hello"}', encoding="utf-8")
    assert make(1, None, dataset_name="custom", dataset_path=str(tmp_path / "f"))[0].content == "hello"


def test_a_server_that_stops_counting_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Dead(Counter):
        async def count(self, text: str) -> int:
            raise HttpError("HTTP 500", 500)

    path = write(tmp_path / "f", [TALK], lines=True)
    for options in ({"dataset_name": "sharegpt", "dataset_path": path}, {"dataset_name": "sonnet"}):
        with pytest.raises(OctavoError, match="/tokenize failed: HTTP 500"):
            make(1, Dead(), **options)


def test_no_usable_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable prompt"):
        make(1, Counter(), dataset_name="sharegpt", dataset_path=write(tmp_path / "f", [SHORT], lines=True))
