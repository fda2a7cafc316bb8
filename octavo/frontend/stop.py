"""Stop strings in a stream of text: hold back what may become one, never let a character of one through.

The rule, which does not depend on how the text is cut into pushes: output ends at the first moment at which some stop
string is complete (the smallest end). Of several that are complete at that same moment, the longest counts, so that
no character of any of them is sent. "First complete" rather than "first begun" because the tokens after a complete
stop are never generated: nothing may depend on them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence


class _Pattern:
    """Knuth, Morris and Pratt's matcher ("Fast pattern matching in strings", 1977) for one stop string.

    The failure table grows only as far as a match ever got, so a stop of a megabyte costs nothing until the text
    follows it. ``str.find`` on the whole output would be quadratic in a stream; on a window it is, too, for stops
    such as "aaa...ab".
    """

    __slots__ = ("failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # how many characters of ``text`` the stream ends with
        self.failure = array("q", [0])  # failure[i]: longest proper border of text[: i + 1]

    def _extend_failure(self, count: int) -> None:
        text, failure = self.text, self.failure
        while len(failure) < count:
            char = text[len(failure)]
            k = failure[-1]
            while k and text[k] != char:
                k = failure[k - 1]
            failure.append(k + 1 if text[k] == char else 0)

    def feed(self, chars: str, at: int, end: int) -> int:
        """Advance over ``chars[at:end]``; where the first complete match in it ends, or -1. Amortised O(end - at)."""
        text, k = self.text, self.matched
        while at < end:
            if k == 0:
                at = chars.find(text[0], at, end)  # nothing begun: skip at C's speed
                if at < 0:
                    break
                k = 1
            else:
                char = chars[at]
                self._extend_failure(k)
                while k and text[k] != char:
                    k = self.failure[k - 1]
                if text[k] == char:
                    k += 1
            at += 1
            if k == len(text):
                self._extend_failure(k)
                self.matched = self.failure[k - 1]
                return at
        self.matched = k
        return -1


class StopChecker:
    """Cuts a stream of text at the first complete stop string.

    ``include_in_output``: the stop itself is sent, and so nothing needs to be held back; otherwise the longest suffix
    of the text that begins a stop is kept until it is clear whether it becomes one.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        if isinstance(stops, str) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise ValueError("stops must be a sequence of non-empty strings")
        # Longest first: of the stops that are complete at the same character, the longest is found first.
        self._patterns = [_Pattern(stop) for stop in sorted(dict.fromkeys(stops), key=len, reverse=True)]
        self._may_begin = re.compile("|".join(re.escape(char) for char in sorted({stop[0] for stop in stops})) or "(?!)").search
        self._begun = False  # the text ends with the beginning of a stop
        self._include = include_in_output
        self._held = ""
        self._pushed = 0
        self.matched: str | None = None
        self.match_end: int | None = None

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take new text; returns (text that may be sent now, the stop string that ended the output or None).

        ``armed=False`` (before min_tokens): a stop that is complete within ``text`` does not count, but one that only
        begins there does once it is completed by a later, armed push. After a match nothing more is sent: further
        pushes give ("", matched). ``match_end`` is then the number of characters pushed up to the stop's end, from
        which a caller that pushes several tokens at once can tell which token completed it.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._begun and not self._may_begin(text):  # nearly always
            self._pushed += len(text)
            return text, None
        held = self._held + text
        end, found = len(text), None
        for pattern in self._patterns:
            at = pattern.feed(text, 0, end)
            while at >= 0 and not armed:
                at = pattern.feed(text, at, end)
            if at >= 0 and (found is None or at < end):
                end, found = at, pattern.text
        if found is not None:
            return self._end(held, len(self._held) + end, self._pushed + end, found)
        self._pushed += len(text)
        longest = max(pattern.matched for pattern in self._patterns)
        self._begun, keep = longest > 0, 0 if self._include else longest
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut], None

    def _end(self, held: str, end: int, match_end: int, stop: str) -> tuple[str, str]:
        self.matched, self.match_end, self._held = stop, match_end, ""
        return held[: end if self._include else end - len(stop)], stop

    def finish(self) -> str:
        """The held-back text, once no more text comes; "" after a match."""
        held, self._held = self._held, ""
        return held
