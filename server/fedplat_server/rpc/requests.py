"""Checks of what callers send, before anything is done with it. All raise `RefusedError`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping

from fedplat import texts, wire
from fedplat_server import files
from fedplat_server.config import Limits
from fedplat_server.rpc.errors import Code, RefusedError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_CLIENT_ID = re.compile(r"c-[0-9a-f]{16}")
_ENROLMENT_ID = re.compile(r"e-[0-9a-f]{12}")


def is_name(text: str) -> bool:
    """Whether a text may name a population, a trainer or an evaluator."""
    return _NAME.fullmatch(text) is not None


def name(text: str, what: str) -> str:
    """A name of a population, a label, a trainer: letters, digits, `_.-`, at most 63."""
    if not is_name(text):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise RefusedError(
            Code.INVALID_REQUEST, f"{what} {shown!r}: expected 1 to 63 letters, digits or _.- (a letter or digit first)"
        )
    return text


def client_id(text: str, unknown: Code) -> str:
    """Return an id that this server may have given to a client; refuse others with `unknown` before any look-up."""
    return _id(_CLIENT_ID, text, unknown)


def enrolment_id(text: str) -> str:
    """Return an id that this server may have given to an enrolment token."""
    return _id(_ENROLMENT_ID, text, Code.NO_SUCH_ENROLMENT)


def _id(form: re.Pattern[str], text: str, unknown: Code) -> str:
    # What no server has made is in no database, and some databases refuse to be asked for it (NUL in PostgreSQL).
    if not form.fullmatch(text):
        raise RefusedError(unknown, repr(text[:80]))
    return text


def digest(text: str) -> str:
    """A SHA-256 in lower-case hexadecimal."""
    if not files.is_digest(text):
        raise RefusedError(Code.INVALID_REQUEST, "a digest must be 64 lower-case hexadecimal digits")
    return text


def names(given: Collection[str], what: str, limits: Limits) -> frozenset[str]:
    """The names of a client's trainers or evaluators."""
    if len(given) > limits.max_names:
        raise RefusedError(Code.INVALID_REQUEST, f"{len(given)} {what}s; at most {limits.max_names} are accepted")
    return _names(tuple(given), what)


@functools.lru_cache(maxsize=256)
def _names(given: tuple[str, ...], what: str) -> frozenset[str]:
    # Clients with the same software say the same: ten thousand that wait hold one set.
    return frozenset(name(one, what) for one in given)


def text(given: str, max_bytes: int) -> str:
    """Return text for people, shortened and without what could steer an operator's terminal."""
    return texts.shortened(given, max_bytes)


def key(text: str) -> str:
    """An idempotency key."""
    if not 8 <= len(text.encode()) <= 200 or not text.isprintable():
        raise RefusedError(Code.INVALID_REQUEST, "an idempotency key must have 8 to 200 bytes of printable UTF-8")
    return text


def labels(given: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """Return the labels of a client, bounded in bytes of UTF-8, singly and together. Raises `RefusedError`."""
    if len(given) > limits.max_labels:
        raise RefusedError(Code.INVALID_REQUEST, f"{len(given)} labels; at most {limits.max_labels} are accepted")
    for label, text in given.items():
        if not label.isidentifier() or len(label.encode()) > 63:
            raise RefusedError(Code.INVALID_REQUEST, f"label {label[:80]!r}: expected a name such as memory_mb")
        if (size := len(text.encode())) > 200:
            raise RefusedError(Code.INVALID_REQUEST, f"label {label!r} has {size} bytes; at most 200")
        if not text.isprintable():
            raise RefusedError(Code.INVALID_REQUEST, f"label {label!r} is {text!r}; expected printable characters")
    if (size := _num_bytes(*given, *given.values())) > limits.max_label_bytes:
        text = f"the labels have {size} bytes in all; at most {limits.max_label_bytes} are accepted"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return dict(given)


def wait_s(given: float, limits: Limits) -> float:
    """How long a long poll waits: what the caller asks for, within the server's bound."""
    return min(max(given, 0.0), limits.max_wait_s) if math.isfinite(given) else 0.0


def protocol_version(given: int) -> None:
    """Refuses a caller that speaks another protocol, naming ours."""
    if given != wire.PROTOCOL_VERSION:
        raise RefusedError(
            Code.UNSUPPORTED_VERSION,
            f"the caller speaks version {given}; supported: {wire.PROTOCOL_VERSION}. Update the older side",
        )


def _num_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)
