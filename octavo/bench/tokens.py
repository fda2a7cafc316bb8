"""Counting tokens, locally or through a server's /tokenize, and writing texts of an exact number of tokens.

Random token ids make poor text: pieces of characters join to other tokens than were asked for. So prompts are made of
words that are one token each after a space (out of the whole vocabulary, where it can be seen), counted, and then
lengthened or shortened by what is missing. Words that a tokenizer makes one and the same token of (<unk>) are of no use: prompts
would be alike, and a server's prefix cache would answer them.
"""

from __future__ import annotations

import random
from collections import Counter as Tally
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from octavo.bench.http import Client, HttpError
from octavo.bench.words import WORDS
from octavo.errors import ConfigError, ModelError, OctavoError, RequestError

T = TypeVar("T")
POOL_SIZE = 4096  # words; the ids tried for it are twice as many
MIN_POOL = 16
SAMPLE = 256  # words that are looked at, whether they are tokens of their own
FIRST_TOKEN_ID = 100  # special tokens are below, as a rule
MAX_VOCAB = 2**20
TRIES = 48  # one or two do, unless words are several tokens each and the last one has to fit


class Counter(Protocol):
    """Counts a prompt's tokens as the server will: with special tokens, and for chats with the template, if ``exact``."""

    exact: bool

    async def count(self, text: str) -> int: ...

    async def words(self, rng: random.Random) -> list[str]:
        """Words that are, after a space, probably one token each."""
        ...

    async def token_ids(self, text: str) -> list[int]:
        """The text's tokens without special ones; none where they can't be seen."""
        ...

    async def vocab_size(self) -> int | None: ...


class LocalCounter:
    """The tokenizer in a local folder, tokenizer.json or GGUF file. Of a chat it counts the content alone."""

    def __init__(self, tokenizer: Any, is_chat: bool = False) -> None:
        self._tokenizer, self._specials = tokenizer, not is_chat
        self.exact = not is_chat

    @classmethod
    def load(cls, path: str, is_chat: bool) -> LocalCounter:
        from octavo.frontend.tokenizer import load_tokenizer

        try:
            return cls(load_tokenizer(path, None), is_chat)
        except ModelError as error:
            raise ConfigError(f"--tokenizer {path}: {error}") from error

    async def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=self._specials))

    async def words(self, rng: random.Random) -> list[str]:
        size = self._tokenizer.vocab_size
        ids = rng.sample(range(size), min(2 * POOL_SIZE, size))
        pieces = [self._tokenizer.token_bytes(i) for i in ids if i not in self._tokenizer.special_token_ids]
        return _clean_words([piece.decode("utf-8", "replace") for piece in pieces])

    async def token_ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def vocab_size(self) -> int | None:
        return int(self._tokenizer.vocab_size)


class ServerCounter:
    """The server's own /tokenize and /detokenize (Octavo and vLLM have them)."""

    exact = True

    def __init__(self, client: Client, model: str, is_chat: bool) -> None:
        self._client, self._model, self._is_chat = client, model, is_chat
        self._vocab: int | None = None
        self._asked_vocab = False

    @classmethod
    async def find(cls, client: Client, model: str, is_chat: bool) -> ServerCounter | None:
        """None if the server has no such route."""
        counter = cls(client, model, is_chat)
        try:
            return counter if await counter.count(" the") > 0 else None
        except (HttpError, LookupError, TypeError):
            return None

    async def count(self, text: str) -> int:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if self._is_chat else {"prompt": text}
        answer = await self._client.get_json("/tokenize", {"model": self._model, **prompt})
        return int(answer["count"])

    async def words(self, rng: random.Random) -> list[str]:
        try:
            size = await self.vocab_size()
            if size is None:
                return []
            low = min(FIRST_TOKEN_ID, size // 2)
            ids = rng.sample(range(low, size), min(2 * POOL_SIZE, size - low))
            text = (await self._client.get_json("/detokenize", {"model": self._model, "tokens": ids}))["prompt"]
            asked = {"model": self._model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
            strings = (await self._client.get_json("/tokenize", asked)).get("token_strs") or []
        except (HttpError, LookupError, TypeError, AttributeError):
            return []
        return _clean_words([s.replace("\u0120", " ").replace("\u2581", " ") for s in strings])

    async def token_ids(self, text: str) -> list[int]:
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            return [int(i) for i in (await self._client.get_json("/tokenize", asked))["tokens"]]
        except (HttpError, LookupError, TypeError, ValueError):
            return []

    async def vocab_size(self) -> int | None:
        """By bisection: the largest id that /detokenize knows. None if it has no such route."""
        if not self._asked_vocab:
            self._asked_vocab = True
            if await self._knows(FIRST_TOKEN_ID) or await self._knows(0):
                low, high = 0, MAX_VOCAB  # known, unknown
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if await self._knows(middle) else (low, middle)
                self._vocab = low + 1
        return self._vocab

    async def _knows(self, token: int) -> bool:
        try:
            return bool((await self._client.get_json("/detokenize", {"model": self._model, "tokens": [token]}))["prompt"])
        except (HttpError, LookupError, TypeError):
            return False


def _clean_words(pieces: list[str]) -> list[str]:
    """Those that are a space and ASCII letters, without the space. A tokenizer of whole words has no spaces in them, and has them all."""
    words = {p[1:] for p in pieces if len(p) > 2 and p[0] == " " and p[1:].isascii() and p[1:].isalpha()}
    if len(words) < MIN_POOL:
        words = {p for p in pieces if len(p) > 1 and p.isascii() and p.isalnum()}
    return sorted(words)[:POOL_SIZE]


async def all_alike(counter: Counter, text: str) -> bool:
    """Whether one token stands for more than half of the text, as <unk> does for words that a tokenizer doesn't know; or none does, where
    there is no <unk>."""
    ids = await asked(counter.token_ids, text)
    if ids:
        return max(Tally(ids).values()) > len(ids) / 2
    return await asked(counter.count, text + text) <= await asked(counter.count, text)  # else they can't be seen


class TextMaker:
    """Texts of random words that have an exact number of tokens."""

    def __init__(self, counter: Counter, words: list[str]) -> None:
        self._counter = counter
        self._words = words if len(words) >= MIN_POOL else WORDS

    @classmethod
    async def create(cls, counter: Counter, rng: random.Random) -> TextMaker | None:
        """None if all words would become the same token, and all texts the same prompt."""
        for words in (await counter.words(rng), []):
            maker = cls(counter, words)
            if not await all_alike(counter, " " + " ".join(maker._words[:SAMPLE])):
                return maker
        return None

    def some_words(self, rng: random.Random, count: int) -> list[str]:
        return rng.choices(self._words, k=count)

    async def prefix(self, rng: random.Random, tokens: int) -> list[str]:
        """Words of ``tokens`` tokens, what the tokenizer or the chat template puts around them not counted."""
        if tokens == 0:
            return []
        around = await asked(self._counter.count, f" {self._words[0]}") - 1
        return (await self.text(rng, tokens + around)).split()

    async def text(self, rng: random.Random, tokens: int, prefix: list[str] | None = None) -> str:
        """A text that counts ``tokens`` tokens and begins with the words ``prefix``. Raises ConfigError where none can."""
        prefix = prefix or []
        words = self.some_words(rng, max(tokens - len(prefix), 1))
        count = 0
        for _ in range(TRIES):
            text = " " + " ".join(prefix + words)
            count = await asked(self._counter.count, text)
            if count == tokens:
                return text
            per_word = max(count / (len(prefix) + len(words) or 1), 1.0)  # 1, but for tokenizers with a poor vocabulary
            if count < tokens:
                words += self.some_words(rng, max(int((tokens - count) / per_word), 1))
            elif words:
                for _ in range(min(max(round((count - tokens) / per_word), 1), len(words))):
                    words.pop(rng.randrange(len(words)))  # not the last: it may be the one that was just tried
            else:
                break
        raise ConfigError(
            f"No text of {tokens} tokens can be made for this model: the closest has {count}. "
            "The chat template or the common prefix alone may be longer; ask for more prompt tokens."
        )


async def asked(count: Callable[[str], Awaitable[T]], text: str) -> T:
    """``await count(text)``, a Counter's method. Raises OctavoError where the server or the tokenizer refuses."""
    try:
        return await count(text)
    except HttpError as error:
        raise OctavoError(f"Counting a prompt's tokens through /tokenize failed: {error}.") from error
    except RequestError as error:
        raise OctavoError(f"Counting a prompt's tokens failed: {error}") from error
