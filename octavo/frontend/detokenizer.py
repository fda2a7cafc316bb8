"""Token ids to text, a few at a time, such that the pieces join to exactly what decoding all at once gives."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from octavo.frontend.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


def _one_for_each_byte(error: UnicodeError) -> tuple[str, int]:
    """U+FFFD for every broken byte, where Python's "replace" gives one for a whole broken sequence."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("octavo.replace_bytes", _one_for_each_byte)


class _Stream(Protocol):
    def push(self, token_ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Decodes one sequence's output as it grows.

    The pieces joined, ``finish`` included, equal ``tokenizer.decode`` of all output tokens, whatever the chunks. With
    ``prompt_token_ids`` they equal what decoding prompt and output together has beyond the prompt: a SentencePiece
    output that begins a word keeps its leading space, and a character that the prompt began is given whole.

    A UTF-8 character split over tokens is held back until it is complete or can't be; at most three bytes are kept.
    ``skip_special_tokens`` leaves special tokens out, but for those ``kept``. ``spaces_between_special_tokens=False``: an
    added token that follows another is written as it is, without the space that some decoders (WordPiece, word-level) put.
    ``whole``: a SentencePiece output keeps its leading space, whatever stood before: a grammar counted it.
    """

    __slots__ = ("_stream", "finish", "push")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept: Collection[int] = (),
        whole: bool = False,
    ) -> None:
        stream: _Stream
        if tokenizer.decoder_kind == "other":
            joined = not spaces_between_special_tokens and not skip_special_tokens
            stream = _WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, joined, kept)
        else:
            stream = _ByteStream(tokenizer, prompt_token_ids, skip_special_tokens, kept, whole)

        self._stream = stream
        self.push: Callable[[Iterable[int]], str] = stream.push
        """Take new output tokens; returns the text that is now certain and was not returned before."""
        self.finish: Callable[[], str] = stream.finish
        """The rest, once no more tokens come: U+FFFD for a character that was never completed, else ""."""


class _ByteStream:
    """For vocabularies whose text is a joining of each token's bytes. Costs a look-up and a join a token."""

    __slots__ = ("_errors", "_pending", "_pieces", "_started", "_strip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool, kept: Collection[int], whole: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces(skip_special_tokens, kept)
        self._errors = "octavo.replace_bytes" if tokenizer.decoder_kind == "sentencepiece" else "replace"
        self._strip = 0 if whole else tokenizer.lead_strip  # spaces still to be taken off the start of the text
        self._started = self._strip == 0
        self._pending = b""
        if prompt:
            self._follow(prompt)

    def _follow(self, prompt: Sequence[int]) -> None:
        """Take the state after a prompt, from its ends alone: prompts are long."""
        if not self._started:
            for token_id in prompt:
                self._begin([token_id])
                if self._started:
                    break
        tail = b""
        for token_id in reversed(prompt):
            tail = self._pieces[token_id] + tail
            if len(tail) > 3:  # no unfinished character is longer than three bytes
                break
        self._pending = tail[codecs.utf_8_decode(tail, self._errors, False)[1] :]

    def push(self, token_ids: Iterable[int]) -> str:
        if not self._started:
            return self._begin(token_ids)
        data = b"".join(map(self._pieces.__getitem__, token_ids))
        if self._pending:
            data = self._pending + data
            self._pending = b""
        text, used = codecs.utf_8_decode(data, self._errors, False)
        if used != len(data):
            self._pending = data[used:]
        return text

    def _begin(self, token_ids: Iterable[int]) -> str:
        """Tokens at the very start of the text, where the space that the tokenizer put before it is taken off."""
        if self._tokenizer.decoder_kind == "metaspace":
            return self._begin_metaspace(list(token_ids))
        self._started = True
        text = self.push(token_ids)
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        self._started = self._strip == 0
        return text

    def _begin_metaspace(self, token_ids: list[int]) -> str:
        """This decoder drops every "▁" of the first token that counts, even if that leaves nothing of it."""
        for at, token_id in enumerate(token_ids):
            if self._pieces[token_id]:
                self._started = True
                first = self._tokenizer.id_to_token(token_id) or ""
                return first.replace("▁", "") + self.push(token_ids[at + 1 :])
        return ""

    def finish(self) -> str:
        text = codecs.utf_8_decode(self._pending, self._errors, True)[0]
        self._pending = b""
        return text


class _WindowStream:
    """For all other vocabularies: decode the last few tokens with the new ones, and take what the new ones added.

    Exact for decoders that treat each token by itself but for the first or last one (WordPiece, word-level, BPE with
    a suffix, CTC's merging of neighbours), which is all that the library has beside those of ``_ByteStream``.
    """

    __slots__ = ("_added", "_after_added", "_backend", "_context_text", "_hidden", "_ids", "_joined")

    CONTEXT = 6  # tokens decoded again
    HOLD = 16  # most tokens held back while the text ends in U+FFFD

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool, joined: bool, kept: Collection[int]) -> None:
        self._backend = tokenizer.backend
        self._hidden = tokenizer.special_token_ids.difference(kept) if skip_special_tokens else frozenset()
        self._added = tokenizer.added_token_ids
        self._joined = joined  # write an added token without a space after another
        self._ids: list[int] = []
        for token_id in reversed(prompt):
            if token_id not in self._hidden and tokenizer.id_to_token(token_id) is not None:
                self._ids.insert(0, token_id)
                if len(self._ids) == self.CONTEXT:
                    break
        self._context_text = self._decode(self._ids)
        self._after_added = bool(self._ids) and self._ids[-1] in self._added

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def push(self, token_ids: Iterable[int]) -> str:
        kept = [i for i in token_ids if i not in self._hidden and self._backend.id_to_token(i) is not None]
        if not self._joined:
            return self._extend(kept, False)
        text = ""
        for token_id in kept:
            is_added = token_id in self._added
            if is_added and self._after_added:
                text += self._extend([], True) + self._backend.id_to_token(token_id)
                self._ids.append(token_id)
                self._context_text = self._decode(self._ids)
            else:
                text += self._extend([token_id], False)
            self._after_added = is_added
        return text

    def _extend(self, new: list[int], final: bool) -> str:
        self._ids += new
        text = self._decode(self._ids)
        if not final and text.endswith(_REPLACEMENT) and len(self._ids) <= self.CONTEXT + self.HOLD:
            return ""
        added = text[len(self._context_text) :]
        del self._ids[: -self.CONTEXT]
        self._context_text = self._decode(self._ids)
        return added

    def finish(self) -> str:
        return self._extend([], True)
