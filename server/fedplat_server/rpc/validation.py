"""Validation of the fields of requests. All functions raise `RefusedError`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping

from fedplat import texts, wire
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError
from fedplat_server.storage import files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_CLIENT_ID = re.compile(r"c-[0-9a-f]{16}")
_ENROLLMENT_ID = re.compile(r"e-[0-9a-f]{12}")
MIN_PROGRESS_EVERY_S = 0.5
"""Each event about the progress of an attempt costs a pass over its clients."""


def is_name(text: str) -> bool:
    """Return whether a text is a valid name of a population, a trainer or an evaluator."""
    return _NAME.fullmatch(text) is not None


def name(text: str, what: str) -> str:
    """Return a valid name, as of a population: at most 63 letters, digits or `_.-`. `what` names the field."""
    if not is_name(text):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise RefusedError(
            Code.INVALID_REQUEST, f"{what} {shown!r}: expected 1 to 63 letters, digits or _.- (a letter or digit first)"
        )
    return text


def client_id(text: str, unknown: Code) -> str:
    """Return an id of the form that servers give to clients; refuse others with `unknown` before any look-up."""
    return _id(_CLIENT_ID, text, unknown)


def enrollment_id(text: str) -> str:
    """Return an id of an enrollment token, of the form that servers give out."""
    return _id(_ENROLLMENT_ID, text, Code.NO_SUCH_ENROLLMENT)


def _id(form: re.Pattern[str], text: str, unknown: Code) -> str:
    # An id of another form is in no database, and some databases fail at the query (PostgreSQL does for NUL).
    if not form.fullmatch(text):
        raise RefusedError(unknown, repr(text[:80]))
    return text


def digest(text: str) -> str:
    """Return a SHA-256 in lower-case hexadecimal."""
    if not files.is_digest(text):
        raise RefusedError(Code.INVALID_REQUEST, "a digest must be 64 lower-case hexadecimal digits")
    return text


def names(given: Collection[str], what: str, limits: Limits) -> frozenset[str]:
    """Return valid names of a client's trainers or evaluators."""
    if len(given) > limits.max_names:
        raise RefusedError(Code.INVALID_REQUEST, f"{len(given)} {what}s; at most {limits.max_names} are accepted")
    return _names(tuple(given), what)


@functools.lru_cache(maxsize=256)
def _names(given: tuple[str, ...], what: str) -> frozenset[str]:
    # Clients with the same software send the same names: ten thousand that wait share one set.
    return frozenset(name(text, what) for text in given)


def text(given: str, max_bytes: int) -> str:
    """Return text for people, shortened and without control characters for an operator's terminal."""
    return texts.shorten(given, max_bytes)


def key(text: str) -> str:
    """Return a valid idempotency key."""
    if not 8 <= len(text.encode()) <= 200 or not text.isprintable():
        raise RefusedError(Code.INVALID_REQUEST, "an idempotency key must have 8 to 200 bytes of printable UTF-8")
    return text


def labels(given: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """Return valid labels of a client, bounded in bytes of UTF-8, each and all together."""
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
    """Return how long a long poll may wait: as the caller asks, up to the server's limit."""
    return min(max(given, 0.0), limits.max_wait_s) if math.isfinite(given) else 0.0


def progress(given: float) -> float:
    """Return the fraction of an assignment that is done. Raises `RefusedError`."""
    if not 0.0 <= given <= 1.0:  # so is NaN
        raise RefusedError(Code.INVALID_REQUEST, f"the progress is {given}; expected a fraction between 0 and 1")
    return given


def progress_every_s(given: float) -> float:
    """Return the seconds between two events about the progress of an attempt; 0 if there are to be none."""
    return max(given, MIN_PROGRESS_EVERY_S) if math.isfinite(given) and given > 0.0 else 0.0


def protocol_version(given: int) -> None:
    """Refuse a caller of another protocol version, and name this one."""
    if given != wire.PROTOCOL_VERSION:
        raise RefusedError(
            Code.UNSUPPORTED_VERSION,
            f"the caller speaks version {given}; supported: {wire.PROTOCOL_VERSION}. Update the older side",
        )


def _num_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)
