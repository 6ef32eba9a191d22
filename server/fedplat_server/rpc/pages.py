"""Pages of lists: bounded by rows and by serialized size, so that each fits into a message with room to spare.

A page token names the last row of a page, by the key that its list is in the order of. Rows that come or go between
two pages do not move the others, and a page costs the same wherever it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from fedplat_server.errors import Code, RefusedError

MAX_ROWS = 250
"""Rows of a page at most, which bounds what a query reads for it: no row has more than some 100 KiB."""
MAX_BYTES = 2**20
"""Serialized size of the messages of a page at most, unless the first one alone is larger."""

ID = re.compile(r"[a-z]-[0-9a-f]{1,64}")
NUMBER = re.compile(r"([0-9]{1,9})")
"""Not more digits: columns of numbers have 32 bits."""
PAIR = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
SEQUENCE = re.compile(r"([0-9]{1,18})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")

_Row = TypeVar("_Row")
_Message = TypeVar("_Message", bound=Message)


def size(asked: int) -> int:
    """Return how many rows a page has at most."""
    return min(asked or MAX_ROWS, MAX_ROWS)


def token(given: str, expected: re.Pattern[str]) -> str:
    """Return a page token that is empty or of a list's form. Raises `RefusedError`."""
    if given and expected.fullmatch(given) is None:
        text = "the page_token is not one of this list; expected the next_page_token of the page before, or none"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return given


def numbers(given: str, expected: re.Pattern[str]) -> tuple[int, ...] | None:
    """Return the numbers in a page token, or None for the first page. Raises `RefusedError`."""
    match = expected.fullmatch(token(given, expected))
    return tuple(map(int, match.groups())) if match is not None else None


def cut(
    rows: Sequence[_Row], num_rows: int, encode: Callable[[_Row], _Message], key: Callable[[_Row], str]
) -> tuple[list[_Message], str]:
    """Return the messages of a page and the token of the next one, empty if these are all rows.

    `rows` begin with the page, and have at least one row more if there is another page.
    """
    page: list[_Message] = []
    num_bytes = 0
    for row in rows[:num_rows]:
        message = encode(row)
        num_bytes += message.ByteSize()
        if page and num_bytes > MAX_BYTES:
            break
        page.append(message)
    return page, key(rows[len(page) - 1]) if len(page) < len(rows) else ""
