"""The templates of text events say what the plain way of making them says, byte for byte."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.parsers import Content
from octavo.server import messages_output, responses_output

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=2, max_size=6)


@given(texts, st.text('abc%d_"\\ é', min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_response_events(pieces: list[str], name: str) -> None:
    plain = responses_output.OutputItems(f"resp_{name}", keep_broken=True)
    quick = responses_output.OutputItems(f"resp_{name}", keep_broken=True)
    for number, piece in enumerate(pieces):
        events = list(plain.add([Content(piece)], []))
        kind, fields = events[-1]
        expected = responses_output.frame(kind, fields, number)
        if number == 0:
            list(quick.add([Content(piece)], []))
        else:
            assert quick.text_delta(piece, number) == expected
    assert list(plain.close("completed")) == list(quick.close("completed"))


@given(texts)
@settings(max_examples=200, deadline=None)
def test_message_events(pieces: list[str]) -> None:
    plain, quick = (messages_output.ContentBlocks(keep_broken=True) for _ in range(2))
    for number, piece in enumerate(pieces):
        expected = messages_output.frame(list(plain.add([Content(piece)]))[-1])
        if number == 0:
            list(quick.add([Content(piece)]))
        else:
            assert quick.text_delta(piece) == expected
    assert list(plain.close()) == list(quick.close())
