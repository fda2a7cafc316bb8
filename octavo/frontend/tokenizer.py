"""Text to token ids and back: ``load_tokenizer`` finds and reads the files, ``Tokenizer`` does the work.

Reads a folder (tokenizer.json with its configuration files, or a SentencePiece tokenizer.model), a tokenizer.json or a
GGUF file. All of it goes through the ``tokenizers`` library; transformers is never needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from octavo.errors import ModelError, RequestError
from octavo.frontend.gguf_tokenizer import BuiltTokenizer, build_from_gguf
from octavo.models.hub import resolve_tokenizer

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable latin-1 stands for itself, the rest for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


class _Pieces(dict[int, bytes]):
    """Token id -> the bytes it adds to the text, worked out on first use: a big vocabulary costs nothing at start-up."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer, self._hidden = tokenizer, hidden

    def __missing__(self, token_id: int) -> bytes:
        if self._tokenizer.id_to_token(token_id) is None:
            return b""  # a padded row of the embedding, which is no token; not kept, so that memory is bounded
        piece = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        self[token_id] = piece
        return piece


class Tokenizer:
    """A model's tokenizer. Immutable after construction, so that any number of threads may use it at once.

    Attributes:
        bos_token, eos_token: their text, or None. eos_token_id: id of ``eos_token``, or None.
        eos_token_ids: all ids that end a turn according to the tokenizer's files, ``eos_token_id`` first.
        special_tokens: name ("bos_token", ...) -> text, as chat templates see them.
        special_token_ids: the ids that ``skip_special_tokens`` leaves out of decoded text.
        added_token_ids: those and the other tokens that are matched whole in text.
        chat_templates: name -> source; "default" is the usual one. chat_template: that one's source, or None.
        decoder_kind: "byte_level", "sentencepiece", "metaspace", or "other" (text that is not a plain joining of bytes).
    """

    def __init__(self, built: BuiltTokenizer) -> None:
        from tokenizers import AddedToken

        self._backend = backend = built.backend
        backend.no_truncation()
        backend.no_padding()
        names = {name: text for name, text in built.special_tokens.items() if text}
        # A token with a role is special whatever the files say of it: shown in no text, matched whole in every text.
        roles = [text for text in dict.fromkeys(names.values()) if backend.token_to_id(text) is not None]
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        missing = [text for text in roles if text not in known or not known[text].special]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])

        self.special_tokens: dict[str, str] = names
        self.bos_token: str | None = names.get("bos_token")
        self.eos_token: str | None = names.get("eos_token")
        self.bos_token_id: int | None = self._id_of(self.bos_token)
        self.eos_token_id: int | None = self._id_of(self.eos_token)
        ends = (self.eos_token_id, *built.eos_token_ids)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.chat_templates: dict[str, str] = dict(built.chat_templates)
        self._added = {i: token.content for i, token in added.items()}
        self._vocab_size = built.vocab_size
        if built.add_bos is not None or built.add_eos is not None:
            self._set_template(bool(built.add_bos), bool(built.add_eos))
        self.decoder_kind, self.lead_strip = _decoder_kind(backend.decoder)
        self._all_pieces = _Pieces(self, frozenset())
        self._text_pieces = _Pieces(self, self.special_token_ids)
        self._kept_pieces: dict[frozenset[int], _Pieces] = {}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _set_template(self, add_bos: bool, add_eos: bool) -> None:
        from tokenizers import processors

        bos = [self.bos_token] if add_bos and self.bos_token_id is not None else []
        eos = [self.eos_token] if add_eos and self.eos_token_id is not None else []
        self._backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{t}:1" for t in bos), "$B:1", *(f"{t}:1" for t in eos)],
            special_tokens=[(token, self._backend.token_to_id(token)) for token in dict.fromkeys(bos + eos)],
        )

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer`` underneath. Never change it: other threads are using it."""
        return self._backend

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included. A model may have more rows (padding), never fewer."""
        if self._vocab_size:
            return self._vocab_size
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __len__(self) -> int:
        return self.vocab_size

    # -- text -> ids ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written in it count as such; BOS and EOS are added as the model's
        files say, if ``add_special_tokens``. RequestError for text that is not valid Unicode (lone surrogates).

        A long text releases the GIL (the library does so in its batch call alone), so a thread pool gains from it.
        """
        try:
            if len(text) < _SHORT_TEXT:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            if isinstance(text, str):
                raise RequestError("The text holds a lone surrogate (half of a UTF-16 pair), which is not a character.") from error
            raise

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` of each text, on all cores and without the GIL."""
        try:
            return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except (UnicodeEncodeError, TypeError):
            return [self.encode(text, add_special_tokens) for text in texts]  # raises for the one that is not Unicode

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """Token sequences that spell ``word`` within a text: at once after other characters, and after a space."""
        core = word.lstrip() or word
        found: list[list[int]] = []
        for text in (core, " " + core):
            ids = self._encode_within(text)
            if ids and ids not in found:
                found.append(ids)
        return found

    def _encode_within(self, text: str) -> list[int]:
        """Ids of ``text`` as the continuation of other text: without the space that SentencePiece puts before a text."""
        plain = self.encode(text, add_special_tokens=False)
        if b"".join(self.token_bytes(i) for i in plain) == text.encode("utf-8", "replace"):
            return plain
        anchor = self.encode("\n", add_special_tokens=False)
        whole = self.encode("\n" + text, add_special_tokens=False)
        return whole[len(anchor) :] if anchor and whole[: len(anchor)] == anchor else plain

    # -- ids -> text ---------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, *, spaces_between_special_tokens: bool = True) -> str:
        """Text of ``ids``, to the byte: no clean-up of spaces, which would alter code and quotations.

        Ids that are no token (padding rows of the embedding) have no text. Bytes that are not UTF-8 become U+FFFD: one
        for each longest broken sequence in byte-level vocabularies (as Unicode recommends), one for each byte token in
        SentencePiece's (as it does itself). RequestError for a negative id.
        ``spaces_between_special_tokens``: see ``Detokenizer``; byte-level and SentencePiece vocabularies have none.
        """
        from octavo.frontend.detokenizer import Detokenizer  # it builds on this module

        ids = list(ids)
        if any(i < 0 for i in ids):
            raise RequestError(f"Token id {min(ids)} is negative.", param="tokens")
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens)
        return stream.push(ids) + stream.finish()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ("Ġhello", "▁hello", "<0x0A>"); None if the id is no token."""
        try:
            return self._backend.id_to_token(token_id)
        except OverflowError:
            return None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for within a text; b"" for an id that is no token.

        Special and added tokens give the UTF-8 of their own text. Of vocabularies of other kinds ("other"), the UTF-8
        of the token as it is spelled.
        """
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        kind = self.decoder_kind
        if kind == "byte_level":
            if token_id not in self._added:
                try:
                    return bytes([_ALPHABET[char] for char in token])
                except KeyError:
                    pass  # not spelled in the alphabet, so it stands for itself
        elif kind == "sentencepiece":
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            token = token.replace("▁", " ")
        elif kind == "metaspace":
            token = token.replace("▁", " ")
        return token.encode("utf-8")

    def pieces(self, skip_special_tokens: bool, kept: Collection[int] = ()) -> Mapping[int, bytes]:
        """``token_bytes`` as a mapping that answers every id at once, special ones with b"" if they are skipped and not ``kept``."""
        if not skip_special_tokens:
            return self._all_pieces
        if not kept:
            return self._text_pieces
        key = frozenset(kept)
        if key not in self._kept_pieces:
            self._kept_pieces[key] = _Pieces(self, self.special_token_ids - key)
        return self._kept_pieces[key]


# Below this many characters encoding takes well under a millisecond, and the batch call's overhead shows.
_SHORT_TEXT = 512


def _decoder_kind(decoder: Any) -> tuple[str, int]:
    """(kind, how many leading spaces of the whole text are taken off) of a ``tokenizers`` decoder.

    Kinds whose text is a joining of each token's bytes are told apart here; their decoding is done with those bytes.
    """
    if decoder is None:
        return "other", 0
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", 0
    if kinds == ["Metaspace"] and steps[0].get("replacement") == "▁":
        scheme = steps[0].get("prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never")
        return "metaspace", 0 if scheme == "never" else 1
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["pattern"] == {"String": "▁"} and steps[0]["content"] == " ":
        if len(kinds) == 3:
            return "sentencepiece", 0
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return "sentencepiece", steps[3]["start"]
    return "other", 0


# ---------------------------------------------------------------------------------------------------------------------
# Loading

# tokenizer.json itself says which special tokens are added around a text. Configurations of these classes overrule it:
# their authors set the flags for a library that built the rule from them (some have a tokenizer.json without the rule).
_CLASSES_WITH_BOS_FLAGS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
_CONVERT = (
    'Convert it once, where transformers and sentencepiece are installed: python -c "from transformers import AutoTokenizer as T; '
    "T.from_pretrained('{path}').save_pretrained('{path}')\""
)


def load_tokenizer(
    model_path: str, tokenizer: str | None = None, *, revision: str | None = None, download_dir: str | None = None
) -> Tokenizer:
    """The tokenizer of a model: out of ``tokenizer`` if given, else out of ``model_path``.

    Either is a folder, a tokenizer.json or a GGUF file; ``tokenizer`` may also be a hub id, of which only the tokenizer's
    files are fetched. ModelError if there is none, or none that can be used, saying what to do.
    """
    path = resolve_tokenizer(tokenizer, revision=revision, download_dir=download_dir) if tokenizer else os.path.expanduser(model_path)
    if os.path.isdir(path):
        return Tokenizer(_build_from_folder(path))
    if not os.path.isfile(path):
        raise ModelError(f"No tokenizer at {path}: there is no such file or folder.")
    if path.endswith(".gguf"):
        return Tokenizer(build_from_gguf(path))
    if path.endswith(".json"):
        return Tokenizer(_build_from_json(path, os.path.dirname(path)))
    if path.endswith(".model"):
        return Tokenizer(_build_from_sentencepiece(path, os.path.dirname(path)))
    raise ModelError(f"Cannot tell what kind of tokenizer {path} is: give a folder, a tokenizer.json or a .gguf file.")


def _build_from_folder(path: str) -> BuiltTokenizer:
    def inside(name: str) -> str | None:
        file = os.path.join(path, name)
        return file if os.path.isfile(file) else None

    if file := inside("tokenizer.json"):
        return _build_from_json(file, path)
    if file := inside("tokenizer.model"):
        return _build_from_sentencepiece(file, path)
    ggufs = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return build_from_gguf(os.path.join(path, ggufs[0]))
    if len(ggufs) > 1:
        raise ModelError(f"{path} holds several GGUF files and no tokenizer.json: pass --tokenizer with one of {', '.join(ggufs)}.")
    others = [name for name in ("vocab.json", "merges.txt", "tekken.json", "spiece.model", "vocab.txt") if inside(name)]
    found = f" ({', '.join(others)} alone can't be used)" if others else ""
    raise ModelError(
        f"{path} holds no tokenizer.json{found}. " + (_CONVERT.format(path=path) if others else "Pass --tokenizer with a folder that does.")
    )


def _build_from_json(file: str, folder: str) -> BuiltTokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(file)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"Cannot read {file}: {error}") from error
    built = BuiltTokenizer(backend=backend, vocab_size=0)
    _apply_config(built, folder)
    return built


def _build_from_sentencepiece(file: str, folder: str) -> BuiltTokenizer:
    from octavo.frontend.sentencepiece_model import build_from_sentencepiece

    built = build_from_sentencepiece(file, _CONVERT.format(path=folder))
    _apply_config(built, folder)
    return built


def _apply_config(built: BuiltTokenizer, folder: str) -> None:
    """Add what a folder's configuration files say to what its vocabulary file says."""
    from tokenizers import AddedToken

    config = _read_json(os.path.join(folder, "tokenizer_config.json"))
    fallback = _read_json(os.path.join(folder, "special_tokens_map.json"))
    for name in SPECIAL_TOKEN_NAMES:
        text = _token_text(config.get(name)) or _token_text(fallback.get(name))
        if text:
            built.special_tokens[name] = text
    known = {token.content: token.special for token in built.backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for key in sorted(declared, key=int):
        spec = declared[key]
        special = bool(spec.get("special"))
        if known.get(spec["content"]) != special and (spec["content"] not in known or special):
            flags = {flag: bool(spec.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            add = built.backend.add_special_tokens if special else built.backend.add_tokens
            add([AddedToken(spec["content"], special=special, **flags)])
            if built.backend.token_to_id(spec["content"]) != int(key):
                raise ModelError(
                    f"{folder}/tokenizer_config.json gives token {spec['content']!r} the id {key}, but tokenizer.json gives it "
                    f"{built.backend.token_to_id(spec['content'])}: the two files don't belong together."
                )
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or fallback.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named = {name: text for name, value in extra.items() if (text := _token_text(value))}
        built.special_tokens.update(named)
        extra = list(named.values())
    texts = [text for value in extra if (text := _token_text(value)) and built.backend.token_to_id(text) is not None]
    built.backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts if not known.get(text)])
    flags = {name: config[name] for name in ("add_bos_token", "add_eos_token") if isinstance(config.get(name), bool)}
    if flags and (built.add_bos is not None or str(config.get("tokenizer_class", "")).removesuffix("Fast") in _CLASSES_WITH_BOS_FLAGS):
        built.add_bos, built.add_eos = flags.get("add_bos_token", True), flags.get("add_eos_token", False)
    built.chat_templates.update(_folder_templates(config, folder))


def _folder_templates(config: dict[str, Any], folder: str) -> dict[str, str]:
    """Name -> chat template; a chat_template.jinja file counts for more than chat_template.json, that more than the configuration."""
    found: dict[str, str] = {}
    for value in (config.get("chat_template"), _read_json(os.path.join(folder, "chat_template.json")).get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            found.update({entry["name"]: entry["template"] for entry in value})
    file = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(file):
        with open(file, encoding="utf-8") as source:
            found["default"] = source.read()
    more = os.path.join(folder, "additional_chat_templates")
    for name in sorted(os.listdir(more)) if os.path.isdir(more) else []:
        if name.endswith(".jinja"):
            with open(os.path.join(more, name), encoding="utf-8") as source:
                found[name[: -len(".jinja")]] = source.read()
    return found


def _read_json(file: str) -> dict[str, Any]:
    if not os.path.isfile(file):
        return {}
    try:
        with open(file, encoding="utf-8") as source:
            value = json.load(source)
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def _token_text(value: Any) -> str | None:
    """A token in a configuration file: a string, or an object whose ``content`` is the string."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
