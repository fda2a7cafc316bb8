"""Incremental scanners: one value of JSON or of Python's literals, written as JSON while it comes.

Both are push-down automata that look at each character once. They hold back only what can't be judged yet: a number or
a word until it ends (so that a cut never shows 1 for 12), an escape until it is whole.
"""

from __future__ import annotations

import json
import re

from octavo.frontend.parsers.reader import Broken, Scanner

MAX_DEPTH = 128
MAX_TOKEN = 512  # characters of a number or a word
_JSON_RUN = re.compile(r'[^"\\\x00-\x1f]*')
JSON_SPECIAL = re.compile(r'["\\\x00-\x1f]').search
"""Finds what is not just a further character of a JSON string."""
_JSON_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SPACE = re.compile(r"[ \t\r\n]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_encode = json.JSONEncoder(ensure_ascii=False).encode


def escaped(text: str) -> str:
    """``text`` as the inside of a JSON string."""
    return _encode(text)[1:-1]


class _Automaton(Scanner):
    """What the two have in common: containers, words, strings. States are the names of the methods that take them on."""

    word_chars: re.Pattern[str]

    def __init__(self) -> None:
        self.done = False
        self.at = 0
        self._state = self._value
        self._stack: list[str] = []  # closing brackets
        self._word: list[str] = []
        self._word_length = 0
        self._key = False  # the string being read is a key
        self._empty = False  # the container has no element yet

    def feed(self, text: str, at: int, out: list[str]) -> int:
        end = len(text)
        while at < end and not self.done:
            at = self._state(text, at, out)
        return at

    def finish(self, out: list[str]) -> None:
        """No more text comes: a number or a word ends. Broken if the value is not whole."""
        if not self.done and self._state == self._in_word:
            self._end_word("", 0, out)
        if not self.done:
            self.fail(0)

    def fail(self, at: int) -> None:
        self.at = at
        raise Broken

    def _spaces(self, text: str, at: int, out: list[str]) -> int:
        match = _SPACE.match(text, at)
        end = match.end() if match else at
        if end > at:
            out.append(text[at:end])
        return end

    def _value(self, text: str, at: int, out: list[str]) -> int:
        at = self._spaces(text, at, out)
        if at == len(text):
            return at
        char = text[at]
        if self._empty and self._stack and char == self._stack[-1]:
            return self._close(char, at, out)
        self._empty = False
        if self._begins_string(char):
            return self._open_string(char, at, out, key=False)
        if char in "{[(" and self._begins_container(char):
            if len(self._stack) >= MAX_DEPTH:
                self.fail(at)
            self._stack.append({"{": "}", "[": "]", "(": ")"}[char])
            out.append("{" if char == "{" else "[")
            self._empty = True
            self._state = self._key_or_end if char == "{" else self._value
            return at + 1
        self._state = self._in_word
        self._word, self._word_length = [], 0
        return at

    def _begins_string(self, char: str) -> bool:
        return char == '"'

    def _begins_container(self, char: str) -> bool:
        return char != "("

    def _open_string(self, quote: str, at: int, out: list[str], *, key: bool) -> int:
        self._key = key
        out.append('"')
        self._state = self._in_string
        return at + 1

    def _key_or_end(self, text: str, at: int, out: list[str]) -> int:
        at = self._spaces(text, at, out)
        if at == len(text):
            return at
        char = text[at]
        if self._begins_string(char):
            return self._open_string(char, at, out, key=True)
        if self._empty and char == "}":
            return self._close(char, at, out)
        self.fail(at)
        return at

    def _colon(self, text: str, at: int, out: list[str]) -> int:
        at = self._spaces(text, at, out)
        if at < len(text):
            if text[at] != ":":
                self.fail(at)
            out.append(":")
            self._state, self._empty = self._value, False
            at += 1
        return at

    def _comma_or_end(self, text: str, at: int, out: list[str]) -> int:
        at = self._spaces(text, at, out)
        if at == len(text):
            return at
        char, closer = text[at], self._stack[-1]
        if char == closer:
            return self._close(char, at, out)
        if char != ",":
            self.fail(at)
        return self._comma(at, out)

    def _comma(self, at: int, out: list[str]) -> int:
        out.append(",")
        self._empty = False
        self._state = self._key_or_end if self._stack[-1] == "}" else self._value
        return at + 1

    def _close(self, char: str, at: int, out: list[str]) -> int:
        self._stack.pop()
        out.append("}" if char == "}" else "]")
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._empty = False
        if self._key:
            self._key, self._state = False, self._colon
        elif self._stack:
            self._state = self._comma_or_end
        else:
            self.done = True

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        match = self.word_chars.match(text, at)
        end = match.end() if match else at
        room = MAX_TOKEN - self._word_length
        if end - at > room:
            self.fail(at + room)
        self._word.append(text[at:end])
        self._word_length += end - at
        return end if end == len(text) else self._end_word(text, end, out)

    def _end_word(self, text: str, at: int, out: list[str]) -> int:
        word = self._to_json("".join(self._word))
        if word is None:
            self.fail(at)
        else:
            out.append(word)
            self._end_value()
        return at

    def _to_json(self, word: str) -> str | None:
        raise NotImplementedError

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        raise NotImplementedError


class JsonScanner(_Automaton):
    """RFC 8259, with two mercies that models need: control characters in strings are escaped, and \\' is an apostrophe.

    White space is passed on as it is. ``objects_only``: the value must be an object.
    """

    word_chars = _JSON_WORD

    def __init__(self, *, objects_only: bool = False) -> None:
        super().__init__()
        self._hex = ""
        if objects_only:
            self._state = self._object

    @property
    def in_string(self) -> bool:
        """Whether the value so far ends within a string, and not within an escape."""
        return self._state == self._in_string

    def _object(self, text: str, at: int, out: list[str]) -> int:
        at = self._spaces(text, at, out)
        if at < len(text):
            if text[at] != "{":
                self.fail(at)
            self._state = self._value
        return at

    def _to_json(self, word: str) -> str | None:
        return word if word in ("true", "false", "null") or _JSON_NUMBER.fullmatch(word) else None

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        match = _JSON_RUN.match(text, at)
        end = match.end() if match else at
        if end > at:
            out.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            out.append('"')
            self._end_value()
        elif char == "\\":
            self._state = self._escape
        else:
            out.append(escaped(char))
        return end + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char == "u":
            self._hex, self._state = "", self._unicode
        elif char in '"\\/bfnrt':
            out.append("\\" + char)
            self._state = self._in_string
        elif char == "'":
            out.append(char)
            self._state = self._in_string
        else:
            self.fail(at)
        return at + 1

    def _unicode(self, text: str, at: int, out: list[str]) -> int:
        if text[at] not in _HEX:
            self.fail(at)
        self._hex += text[at]
        if len(self._hex) == 4:
            out.append("\\u" + self._hex)
            self._state = self._in_string
        return at + 1


_PYTHON_RUN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_PYTHON_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_PYTHON_INT = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+|[0-9]+)")
_PYTHON_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonScanner(_Automaton):
    """A Python literal: strings, numbers, True, False, None, lists, tuples, dicts with string keys. White space is dropped.

    Line breaks may stand in strings. No prefixes (r"", f""), no sets, no arithmetic.
    """

    word_chars = _PYTHON_WORD

    def __init__(self) -> None:
        super().__init__()
        self._quote = '"'
        self._hex, self._digits = "", 0

    def _spaces(self, text: str, at: int, out: list[str]) -> int:
        match = _SPACE.match(text, at)
        return match.end() if match else at

    def _begins_string(self, char: str) -> bool:
        return char in "\"'"

    def _begins_container(self, char: str) -> bool:
        return True

    def _open_string(self, quote: str, at: int, out: list[str], *, key: bool) -> int:
        self._quote = quote
        return super()._open_string(quote, at, out, key=key)

    def _comma(self, at: int, out: list[str]) -> int:
        self._state = self._after_comma  # [1, 2,] is fine in Python: the comma is written when an element follows
        return at + 1

    def _after_comma(self, text: str, at: int, out: list[str]) -> int:
        at = self._spaces(text, at, out)
        if at == len(text):
            return at
        if text[at] == self._stack[-1]:
            return self._close(text[at], at, out)
        out.append(", ")
        self._empty = False
        self._state = self._key_or_end if self._stack[-1] == "}" else self._value
        return at

    def _colon(self, text: str, at: int, out: list[str]) -> int:
        before = len(out)
        at = super()._colon(text, at, out)
        if len(out) > before:
            out[-1] = ": "
        return at

    def _to_json(self, word: str) -> str | None:
        if word in _WORDS:
            return _WORDS[word]
        digits = word.replace("_", "")
        if _JSON_NUMBER.fullmatch(digits):
            return digits  # as written: no rounding
        if _PYTHON_INT.fullmatch(digits):
            return str(int(digits, 10 if digits.lstrip("+-").isdecimal() else 0))
        if _PYTHON_FLOAT.fullmatch(digits):
            value = float(digits)
            return repr(value) if value - value == 0 else None
        return None

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        match = _PYTHON_RUN[self._quote].match(text, at)
        end = match.end() if match else at
        if end > at:
            out.append(escaped(text[at:end]))
        if end == len(text):
            return end
        if text[end] == self._quote:
            out.append('"')
            self._end_value()
        else:
            self._state = self._escape
        return end + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        self._state = self._in_string
        if char in _HEX_DIGITS:
            self._hex, self._digits, self._state = "", _HEX_DIGITS[char], self._code_point
        else:
            out.append(escaped(_ESCAPES.get(char, "\\" + char)))  # Python, too, keeps the backslash of an unknown escape
        return at + 1

    def _code_point(self, text: str, at: int, out: list[str]) -> int:
        if text[at] not in _HEX:
            self.fail(at)
        self._hex += text[at]
        if len(self._hex) == self._digits:
            code = int(self._hex, 16)
            if code > 0x10FFFF:
                self.fail(at)
            out.append(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code)))
            self._state = self._in_string
        return at + 1


def as_json(scanner: _Automaton, text: str) -> str | None:
    """All of ``text`` as one value, or None if it is none."""
    out: list[str] = []
    try:
        end = scanner.feed(text, 0, out)
        scanner.finish(out)
    except Broken:
        return None
    return None if text[end:].strip(" \t\r\n") else "".join(out)
