"""Text from outside is bounded in bytes and steers no terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat import texts


@given(st.text(st.characters(), max_size=60), st.integers(0, 50))
@pytest.mark.fault("F46")
def test_any_text_is_bounded_in_bytes_and_printable(text: str, max_bytes: int) -> None:
    short = texts.shorten(text, max_bytes)
    assert len(short.encode()) <= max_bytes
    assert all(char.isprintable() or char == "\n" for char in short)
    assert texts.shorten(short, max_bytes) == short


@pytest.mark.parametrize(
    ("text", "max_bytes", "short"),
    [
        ("as it is\nin two lines", 100, "as it is\nin two lines"),
        ("\x1b]0;title\x07", 100, "\ufffd]0;title\ufffd"),
        ("\U0001f600" * 5, 20, "\U0001f600" * 5),
        ("\U0001f600" * 5, 19, "\U0001f600" * 4 + "..."),
        ("\ud800", 3, "\ufffd"),
        ("\x00" * 3, 8, "\ufffd..."),
        ("four", 2, ".."),
    ],
)
def test_texts_are_shortened(text: str, max_bytes: int, short: str) -> None:
    assert texts.shorten(text, max_bytes) == short


def test_what_is_quoted_is_escaped_and_short() -> None:
    assert texts.quote("a\x1bb") == r"'a\x1bb'"
    assert len(texts.quote("\x1b" * 10**6)) < 500
    assert len(texts.quote("x" * 10**6)) < 500
    assert texts.quote("x" * 200) == "'" + "x" * 200 + "'"
    assert texts.format_numbers([1, -2, 10**4000]) == "[1, -2, (a number of 13288 bits)]"
