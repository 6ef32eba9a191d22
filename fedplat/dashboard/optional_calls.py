"""Calls that an older server does not have, or that need a higher role: the page shows a sentence, and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from fedplat.dashboard.server_source import refusal_code
from fedplat.errors import ServerRefusedError

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
