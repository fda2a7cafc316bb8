"""A tokenizer out of a GGUF file's metadata (or a SentencePiece model's pieces), built on the ``tokenizers`` library.

What each ``tokenizer.ggml.pre`` means is fixed by the
tokenizer.json that the model was published with, and by llama.cpp, which writes these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ModelError
from octavo.weights.gguf_file import GgufFile

# Token types of GGUF; SentencePiece's own numbers are the same.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"""
    + r"|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE: regular expressions, applied one within the pieces of the last.

    ignore_merges: a piece that is in the vocabulary as a whole is one token. nfc: text is composed first.
    add_bos: whether BOS is added when the file doesn't say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


def _table() -> dict[str, PreTokenizer]:
    variants: dict[PreTokenizer, str] = {
        PreTokenizer((_GPT2,)): "default gpt-2 phi-2 mpt olmo jais exaone4 gigachat jina-es jina-de jina-v2-es jina-v2-de a.x-4.0 mellum "
        "modern-bert roberta-bpe",
        PreTokenizer((_DIGIT, _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
        PreTokenizer((_QWEN2,), nfc=True): "qwen2",
        PreTokenizer((_QWEN2,)): "stablelm2 deepseek-r1-qwen megrez kormo",
        PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
        PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
        PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense",
    }
    return {name: variant for variant, names in variants.items() for name in names.split()}


PRE_TOKENIZERS = _table()
# Files from before the key existed (April 2024) can be told by their architecture.
_PRE_OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}

# Ends of a chat turn, for files that name no ``eot_token_id``: first one present (as a control token) counts.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


@dataclass
class BuiltTokenizer:
    """What a reader of some format hands to ``Tokenizer``; ``backend`` is a ``tokenizers.Tokenizer``."""

    backend: Any
    vocab_size: int
    special_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", ...
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)


def read_gguf_metadata(path: str, prefixes: tuple[str, ...] = ("tokenizer.", "general.architecture")) -> dict[str, Any]:
    """Key -> value of the keys that start with one of ``prefixes``. ModelError if the file is broken."""
    file = GgufFile(path)
    return {key: file[key] for key in file if key.startswith(prefixes)}


# ---------------------------------------------------------------------------------------------------------------------
# Building


def build_from_gguf(path: str) -> BuiltTokenizer:
    """The tokenizer of a GGUF file. ModelError for kinds that can't be built, with the list of those that can."""
    metadata = read_gguf_metadata(path)

    def ggml(key: str) -> Any:
        return metadata.get("tokenizer.ggml." + key)

    model, tokens = ggml("model"), ggml("tokens")
    if not tokens or model is None:
        raise ModelError(f"{path} holds no tokenizer (tokenizer.ggml.tokens): pass --tokenizer with a folder that has a tokenizer.json.")
    types = ggml("token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens.")
    if model == "gpt2":
        name = ggml("pre") or _PRE_OF_ARCHITECTURE.get(metadata.get("general.architecture", ""), "default")
        variant = _pre_tokenizer(name, path)
        backend = byte_level_backend(tokens, _merges(ggml("merges"), path), variant, path)
        add_bos = variant.add_bos
    elif model == "llama":
        prefix = ggml("add_space_prefix")
        backend = sentencepiece_backend(tokens, types, ggml("scores"), ggml("merges"), prefix is None or bool(prefix), path)
        add_bos = True
    else:
        raise ModelError(
            f"{path}: tokenizer model {model!r} (tokenizer.ggml.model) is not supported; supported are gpt2 (byte-level BPE) and "
            f"llama (SentencePiece BPE). Pass --tokenizer with a folder that has this model's tokenizer.json."
        )
    add_typed_tokens(backend, tokens, types)
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator"), ("mask", "mask")):
        token_id = ggml(key + "_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special[role + "_token"] = tokens[token_id]
    return BuiltTokenizer(
        backend=backend,
        vocab_size=len(tokens),
        special_tokens=special,
        eos_token_ids=_end_ids(ggml, tokens, types),
        add_bos=add_bos if ggml("add_bos_token") is None else bool(ggml("add_bos_token")),
        add_eos=bool(ggml("add_eos_token")),
        chat_templates=_chat_templates(metadata),
    )


def _pre_tokenizer(name: str, path: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Pass --tokenizer with a folder that has this model's tokenizer.json."
        )
    return PRE_TOKENIZERS[name]


def _merges(merges: list[str] | None, path: str) -> list[tuple[str, str]]:
    if merges is None:
        raise ModelError(f"{path} holds a BPE vocabulary without tokenizer.ggml.merges.")
    # A merge is two tokens and a space; the left one may itself begin with a space in some vocabularies.
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ModelError(f"{path}: tokenizer.ggml.merges has an entry that is not two tokens.")
    return pairs


def _end_ids(ggml: Any, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    ids = [ggml(key + "_token_id") for key in ("eos", "eot", "eom")]
    if ids[1] is None:
        by_name = {tokens[i]: i for i in range(len(tokens)) if types[i] == CONTROL}
        ids[1] = next((by_name[name] for name in _TURN_ENDS if name in by_name), None)
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < len(tokens)))


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in metadata.items():
        if isinstance(value, str) and value and (key == prefix or key.startswith(prefix + ".")):
            found[key[len(prefix) + 1 :] or "default"] = value
    return found


def byte_level_backend(tokens: Sequence[str], merges: list[tuple[str, str]], variant: PreTokenizer, path: str) -> Any:
    """A ``tokenizers.Tokenizer`` for byte-level BPE (GPT-2's alphabet)."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    backend = Tokenizer(_bpe({token: i for i, token in enumerate(tokens)}, merges, path, ignore_merges=variant.ignore_merges))
    if variant.nfc:
        backend.normalizer = normalizers.NFC()
    if variant.splits[-1] == _GPT2:  # the library's own matcher is several times as fast as the same regular expression
        last = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        splits = variant.splits[:-1]
    else:
        last = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        splits = variant.splits
    first = [pre_tokenizers.Digits(individual_digits=True) if s == _DIGIT else pre_tokenizers.Split(Regex(s), "isolated") for s in splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(first + last)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_backend(
    tokens: Sequence[str], types: Sequence[int], scores: list[float] | None, merges: list[str] | None, add_space_prefix: bool, path: str
) -> Any:
    """A ``tokenizers.Tokenizer`` for SentencePiece BPE with byte fallback.

    A space is written "▁"; one is put before the text and before text that follows a special token (as llama.cpp and
    the models' own training did), and taken off again by the decoder.
    """
    from tokenizers import Tokenizer, decoders, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    if scores is not None:
        pairs = merges_from_scores(vocab, tokens, types, scores)
    elif merges is not None:
        pairs = _merges(merges, path)
    else:
        raise ModelError(f"{path} holds a SentencePiece vocabulary with neither scores nor merges.")
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == UNKNOWN), None)
    backend = Tokenizer(_bpe(vocab, pairs, path, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def merges_from_scores(
    vocab: dict[str, int], tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merge rules in the order in which SentencePiece applies them: the pair whose whole has the best score first.

    Each way to cut a token into two known ones is a rule. Rules of one token come together, the longest left half
    first: a run of one character (spaces, above all) then grows from its left end, as it does there.
    """
    usable = {token for token, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}
    order = sorted((i for i in vocab.values() if types[i] == NORMAL and len(tokens[i]) > 1), key=lambda i: (-scores[i], i))
    pairs = []
    for i in order:
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                pairs.append((left, right))
    return pairs


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], path: str, **options: Any) -> Any:
    from tokenizers import models

    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{path}: the vocabulary and its merges don't fit together: {error}") from error


def add_typed_tokens(backend: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Register the tokens that are matched whole in text: control and unknown ones are special, user-defined are not."""
    from tokenizers import AddedToken

    special = [token for token, kind in zip(tokens, types) if kind in (CONTROL, UNKNOWN) and token]
    plain = [token for token, kind in zip(tokens, types) if kind == USER_DEFINED and token]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
