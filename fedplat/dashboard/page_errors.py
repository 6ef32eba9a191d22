"""Failures as pages: a sentence about what is wrong and what to do, never a traceback."""

from __future__ import annotations

import grpc

from fedplat.dashboard.pages.actions import InputError
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.server_source import refusal_code
from fedplat.dashboard.visit import NotFoundError
from fedplat.errors import FedplatError, ServerRefusedError, ServerUnreachableError

_STATUSES = {
    grpc.StatusCode.PERMISSION_DENIED: (403, "Not allowed"),
    grpc.StatusCode.NOT_FOUND: (404, "Not found"),
    grpc.StatusCode.INVALID_ARGUMENT: (400, "Not valid"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "Not possible now"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "Not possible now"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "Too many requests"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "Not supported by this server"),
}


class SignedOutError(Exception):
    """The server no longer accepts the session's token: its operator was removed, or the token has expired."""


def describe_failure(error: Exception) -> Page:
    """Return the page about a failure. Raises `SignedOutError`, or the error itself if this program has a mistake."""
    if isinstance(error, ServerUnreachableError):
        return _page(503, "The server does not answer", str(error))
    if isinstance(error, ServerRefusedError):
        code = refusal_code(error)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise SignedOutError from error
        status, title = _STATUSES.get(code, (502, "The server refused the request")) if code else (502, "Refused")
        return _page(status, title, str(error))
    if isinstance(error, NotFoundError):
        return _page(404, "Not found", "this address names no page here; use the menu")
    if isinstance(error, InputError):
        return _page(422, "Not confirmed", str(error))
    if isinstance(error, FedplatError):
        return _page(500, "The data cannot be read", str(error))
    raise error


def _page(status: int, title: str, text: str) -> Page:
    sentence = f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?")) else ".")
    return Page("failure.html", title, {"text": sentence, "is_away": status == 503}, status=status, is_live=False)
