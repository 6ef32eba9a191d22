"""Follows the pages of a list of the Admin service."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar


class Paged(Protocol):
    """A page of a list."""

    next_page_token: str


Page = TypeVar("Page", bound=Paged)
Row = TypeVar("Row")


def pages(call: Callable[[Any], Page], request: Any) -> Iterator[Page]:
    """Yield the pages of a list, one call each; `request` is changed."""
    while True:
        page = call(request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def rows(
    call: Callable[[Any], Page], request: Any, rows_of: Callable[[Page], Iterable[Row]], limit: int | None
) -> Iterator[Row]:
    """Yield the rows of a list, at most `limit` of them, as its pages come."""
    request.page_size = min(limit or 0, 2**31)
    return itertools.islice((row for page in pages(call, request) for row in rows_of(page)), limit)
