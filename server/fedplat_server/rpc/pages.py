"""Pages of lists: limited in rows and in serialized size, so that each page fits into a message.

A page token is the sort key of the last row of a page. So rows that are added or removed between two pages do not shift
the others, and the cost of a page does not depend on its position.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from fedplat_server.database.records import spaced_positions
from fedplat_server.errors import Code, RefusedError

MAX_ROWS = 250
"""Maximum rows of a page, which bounds the bytes that a query reads: a row has at most about 100 KiB."""
MAX_BYTES = 2**20
"""Maximum serialized size of the messages of a page, unless the first message is larger."""

ID = re.compile(r"[a-z]-[0-9a-f]{1,64}")
NUMBER = re.compile(r"([0-9]{1,9})")
"""At most 9 digits, because number columns have 32 bits."""
PAIR = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
SEQUENCE = re.compile(r"([0-9]{1,18})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")

_Row = TypeVar("_Row")
_Message = TypeVar("_Message", bound=Message)


def size(requested: int) -> int:
    """Return the maximum rows of a page; `requested` is 0 for the default."""
    return min(requested or MAX_ROWS, MAX_ROWS)


def token(text: str, expected: re.Pattern[str]) -> str:
    """Return a page token that is empty or of a list's format. Raises `RefusedError` for others."""
    if text and expected.fullmatch(text) is None:
        problem = "the page_token is not one of this list; expected the next_page_token of the previous page, or none"
        raise RefusedError(Code.INVALID_REQUEST, problem)
    return text


def numbers(text: str, expected: re.Pattern[str]) -> tuple[int, ...] | None:
    """Return the numbers in a page token, or None for the first page. Raises `RefusedError` if it is invalid."""
    match = expected.fullmatch(token(text, expected))
    return tuple(map(int, match.groups())) if match is not None else None


def cut(
    rows: Sequence[_Row], num_rows: int, encode: Callable[[_Row], _Message], key: Callable[[_Row], str]
) -> tuple[list[_Message], str]:
    """Return the messages of a page and the token of the next page ("" on the last page).

    `rows` start with the first row of the page, and must include at least one row of the next page if it exists.
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


def thin_out(messages: Sequence[_Message]) -> list[_Message]:
    """Return as many evenly spaced messages as fit into a page, with the first and the last one."""
    kept = list(messages)
    while len(kept) > 2 and sum(message.ByteSize() for message in kept) > MAX_BYTES:
        kept = [kept[position - 1] for position in spaced_positions(len(kept), len(kept) * 3 // 4)]
    return kept
