"""One request of a signed-in operator, as the functions of the pages see it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar, cast
from urllib.parse import urlencode

import grpc

from fedplat.dashboard.source import AdminSource, PageSource, refusal_code
from fedplat.errors import ServerRefusedError
from fedplat.wire.v1 import admin_pb2

MAX_TEXT = 300
"""Characters of a filter. Longer ones are cut."""
PAGE_SIZE = 50


class NotFoundError(Exception):
    """The address names no page."""


@dataclasses.dataclass(frozen=True)
class Paging:
    """The position in a list: the server's token of this page, and the number of its first row."""

    token: str
    first: int


@dataclasses.dataclass(frozen=True)
class Pager:
    """The links of a list: `first` is the number of the first row, `next_address` is empty on the last page."""

    first: int
    last: int
    total: int
    next_address: str
    first_address: str


@dataclasses.dataclass(frozen=True)
class Visit:
    """A request for a page. `names` are the variables of the address, `query` its parameters."""

    source: PageSource
    status: admin_pb2.GetStatusResponse
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def server(self) -> AdminSource:
        """The source, if it is a server. Raises `NotFoundError` for a simulation."""
        if self.source.is_simulation:
            raise NotFoundError
        return cast(AdminSource, self.source)

    def text(self, name: str) -> str:
        """Return a parameter; empty without it."""
        return self.query.get(name, "")[:MAX_TEXT].strip()

    def choice(self, name: str, choices: Mapping[str, object] | tuple[str, ...]) -> str:
        """Return a parameter that has one of some values; empty otherwise."""
        value = self.text(name)
        return value if value in choices else ""

    def number(self, name: str) -> int:
        """Return a variable of the address. Raises `NotFoundError` if it is not a number of 32 bits."""
        return parse_number(self.names[name])

    @property
    def paging(self) -> Paging:
        """The position in the list of this page."""
        first = self.text("from")
        return Paging(self.text("page"), int(first) if first.isascii() and first.isdecimal() and len(first) < 10 else 1)

    def pager(self, num_rows: int, total: int, next_token: str) -> Pager:
        """Return the links around a page of rows, with the filters of this page."""
        first = self.paging.first
        kept = {name: value for name, value in self.query.items() if name not in ("page", "from", "live")}
        following = {**kept, "page": next_token, "from": str(first + num_rows)}
        return Pager(
            first=first if num_rows else 0,
            last=first + num_rows - 1 if num_rows else 0,
            total=max(total, first + num_rows - 1 if num_rows else 0),
            next_address=f"{self.path}?{urlencode(following)}" if next_token else "",
            first_address=f"{self.path}?{urlencode(kept)}" if self.paging.token else "",
        )


def parse_number(text: str) -> int:
    """Return a number of an address or a form. Raises `NotFoundError` if it is not a number of 32 bits."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10) or int(text) >= 2**32:
        raise NotFoundError
    return int(text)


def is_finite(value: float) -> bool:
    """Return whether a metric can be drawn."""
    return math.isfinite(value)


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class OptionalResult(Generic[T]):
    """The response to a call, or a sentence about its absence."""

    value: T | None = None
    problem: str = ""


def call_if_supported(call: Callable[[], T]) -> OptionalResult[T]:
    """Return the response; a sentence if the server does not have the call, or the operator may not make it."""
    try:
        return OptionalResult(call())
    except ServerRefusedError as exc:
        code = refusal_code(exc)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return OptionalResult(problem="This server does not record them; update fedplat-server to see them here.")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return OptionalResult(problem=f"{str(exc)[:1].upper()}{str(exc)[1:]}.")
        raise
