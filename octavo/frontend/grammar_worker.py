"""A process that reads what clients send as schemas, expressions and grammars, so that none of it can stop the server.

Its parent (grammar_compiler.py) ends it when it takes too long; a crash or a lack of memory ends nothing else.
Messages on standard input and output: four bytes of length (little-endian), then MessagePack. The first is the vocabulary,
every other one ``[kind, value]``; an answer is ``[grammar, error, pointer]``, with null for what there is not.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from octavo.engine.grammar import build_tokenizer, new_matcher
from octavo.frontend.grammars import OPTIONS, GrammarError, to_grammar
from octavo.types import GrammarVocabulary

MEMORY_BYTES = 8 << 30  # of address space; a vocabulary's tables and llguidance's threads take under two
MAX_SECONDS = 60
_LENGTH = struct.Struct("<I")
# Messages list the lines around a fault, and with them the one that lark_grammar adds at the end.
_OWN_LINE = re.compile(r"\n *\d+ \| " + re.escape(OPTIONS.strip()) + r"(\n *\d+ \|\s*$)?")


def main() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to the log
    _limit_memory()
    vocabulary = msgspec.msgpack.decode(read(source) or b"", type=GrammarVocabulary)
    tokenizer = build_tokenizer(vocabulary)
    special = {}
    for token_id in vocabulary.special_token_ids:
        text = vocabulary.tokens[token_id].decode("utf-8", "replace")
        if text:
            special[text] = token_id
    write(sink, [None, None, None])  # ready
    while (data := read(source)) is not None:
        signal.alarm(MAX_SECONDS)  # ends this process in the middle of whatever it does, should its parent be gone
        kind, value = msgspec.msgpack.decode(data)
        try:
            answer: list[str | None] = [to_grammar(kind, value, lambda grammar: complaint(tokenizer, grammar), special), None, None]
        except GrammarError as error:
            answer = [None, str(error), error.pointer]
        except (RecursionError, MemoryError):
            answer = [None, "It is nested too deeply, or too large.", ""]
        except Exception as error:  # noqa: BLE001 (whatever a client found, it is the client's alone)
            answer = [None, f"It can't be read ({type(error).__name__}: {str(error)[:200]}).", ""]
        signal.alarm(0)
        write(sink, answer)


def complaint(tokenizer: object, grammar: str) -> str:
    """Why a grammar can't be used, or "": it is compiled, and its first mask is computed, within the engine's limits."""
    matcher = new_matcher(tokenizer, grammar)
    if matcher.is_error():
        return plain(matcher.get_error())
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        return "No output can match it." if error.startswith("NoExtension") else f"It asks for too much work ({plain(error)})."
    return "" if any(mask) else "No output can match it."


def plain(error: str) -> str:
    """A message of llguidance without what tells of our use of it: the generated line around a schema or an expression."""
    text = error.replace("<non-verbose/>", "").strip()
    for mark in ("failed to compile JSON schema: ", "regex parse error:", '" (in regex): '):
        if mark in text:
            text = text.partition(mark)[2].partition("\n   1 |")[0].partition("\n   2 |")[0].strip()
            if "error: " in text:
                text = text.rpartition("error: ")[2]
    if text.startswith("oneOf constraints"):
        return "oneOf is supported only where at most one of its schemas can hold (a property with another const in each); use anyOf."
    return _OWN_LINE.sub("", text.partition("\n  while processing")[0])[:1000]


def read(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    return source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


def write(sink: BinaryIO, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    sink.write(_LENGTH.pack(len(data)) + data)
    sink.flush()


def _limit_memory() -> None:
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(5)  # before the engine's steps it can wait
    except (ImportError, ValueError, OSError):  # not on this system
        pass


if __name__ == "__main__":
    main()
