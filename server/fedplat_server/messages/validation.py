"""Validation of the fields of requests. All functions raise `RefusedError`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping

from fedplat import texts, wire
from fedplat.wire import digests
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.config import Limits
from fedplat_server.errors import Code, RefusedError
from fedplat_server.storage import files

_NAME = re.compile(texts.NAME_PATTERN)
_CLIENT_ID = re.compile(r"c-[0-9a-f]{16}")
_ENROLLMENT_ID = re.compile(r"e-[0-9a-f]{12}")
MAX_SEARCH_BYTES = 200
MAX_NUMBER = 2**31 - 2
MIN_PROGRESS_EVERY_S = 0.5
"""Minimum interval between progress events: each one iterates over the clients of an attempt."""


def is_name(text: str) -> bool:
    """Return whether a text is a valid name of a population, a trainer or an evaluator."""
    return _NAME.fullmatch(text) is not None


def name(text: str, field: str) -> str:
    """Return a valid name, for example of a population: 1 to 63 letters, digits or `_.-`. `field` is for the error."""
    if not is_name(text):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise RefusedError(
            Code.INVALID_REQUEST,
            f"{field} {shown!r}: expected 1 to 63 letters, digits or _.- (a letter or digit first)",
        )
    return text


def is_client_id(text: str) -> bool:
    """Return whether a text is the well-formed id of a client."""
    return _CLIENT_ID.fullmatch(text) is not None


def client_id(text: str, unknown: Code) -> str:
    """Return a well-formed client id; refuse others with the code `unknown`, before any query."""
    return _id(_CLIENT_ID, text, unknown)


def enrollment_id(text: str) -> str:
    """Return a well-formed id of an enrollment token."""
    return _id(_ENROLLMENT_ID, text, Code.NO_SUCH_ENROLLMENT)


def _id(pattern: re.Pattern[str], text: str, unknown: Code) -> str:
    # A malformed id is in no database, and may make the query fail (in PostgreSQL, if it has a NUL).
    if not pattern.fullmatch(text):
        raise RefusedError(unknown, repr(text[:80]))
    return text


def digest(text: str) -> str:
    """Return a SHA-256 in lower-case hexadecimal."""
    if not files.is_digest(text):
        raise RefusedError(Code.INVALID_REQUEST, "a digest must be 64 lower-case hexadecimal digits")
    return text


def update_digest(text: str) -> str:
    """Return the digest of an update, which may be one of BLAKE3."""
    return _known_kind(text) if digests.is_digest(text) else digest(text)


def upload_id(text: str) -> str:
    """Return the id of an upload whose digest follows its bytes."""
    if not files.is_upload_id(text):
        raise RefusedError(Code.INVALID_REQUEST, "an upload_id must be 32 lower-case hexadecimal digits")
    return _known_kind(text)


def _known_kind(name: str) -> str:
    if digests.kind_of(name) and not digests.has_blake3():
        raise RefusedError(Code.INVALID_REQUEST, "this server does not have BLAKE3; send an update with a SHA-256")
    return name


def upload_name(request: fleet_pb2.UploadHeader | fleet_pb2.QueryUploadRequest) -> str:
    """Return the name of an unfinished upload: its digest, or its id if the digest is not known yet."""
    if not request.upload_id:
        return digest(request.digest)
    if request.digest or request.receiver:
        text = "an upload has a digest or an upload_id, and one for another client has a digest; leave out the other"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return upload_id(request.upload_id)


def names(values: Collection[str], field: str, limits: Limits) -> frozenset[str]:
    """Return valid names of a client's trainers, evaluators, codecs or algorithms."""
    if len(values) > limits.max_names:
        raise RefusedError(Code.INVALID_REQUEST, f"{len(values)} {field}s; at most {limits.max_names} are accepted")
    return _names(tuple(values), field)


@functools.lru_cache(maxsize=256)
def _names(values: tuple[str, ...], field: str) -> frozenset[str]:
    # Clients with the same software send the same names: ten thousand waiting clients share one set.
    return frozenset(name(value, field) for value in values)


MAX_APPROVALS = 500
"""Approvals that a check-in may announce."""
MAX_REJECTIONS = 100


def approvals(request: fleet_pb2.CheckInRequest) -> frozenset[str] | None:
    """Return the digests of the jobs that the owner of a client has approved; None: it takes part in any."""
    if not request.HasField("approvals"):
        return None
    found = request.approvals
    counts = (("approvals", len(found.approved), MAX_APPROVALS), ("rejections", len(found.rejected), MAX_REJECTIONS))
    for kind, count, most in counts:
        if count > most:
            raise RefusedError(Code.INVALID_REQUEST, f"{count} {kind}; at most {most} are accepted")
    return frozenset(map(digest, found.approved))


def text(value: str, max_bytes: int) -> str:
    """Return text for an operator's terminal: shortened, without control characters."""
    return texts.shorten(value, max_bytes)


def search(text: str, field: str = "search") -> str:
    """Return the text of a filter: at most 200 bytes, printable. `field` is for the error."""
    if len(text.encode()) > MAX_SEARCH_BYTES or not text.isprintable():  # PostgreSQL refuses a NUL
        raise RefusedError(
            Code.INVALID_REQUEST, f"{field}: expected at most {MAX_SEARCH_BYTES} bytes of printable text"
        )
    return text


def number(value: int, field: str) -> int:
    """Return the number of a round or an attempt, within the range of the database. `field` is for the error."""
    if value > MAX_NUMBER:
        raise RefusedError(Code.INVALID_REQUEST, f"{field} is {value}; expected at most {MAX_NUMBER}")
    return value


def since(unix_s: float) -> float:
    """Return the least time of a filter, in seconds since 1970; 0 for all."""
    if not (math.isfinite(unix_s) and unix_s >= 0.0):
        raise RefusedError(Code.INVALID_REQUEST, f"since_unix_s is {unix_s}; expected seconds since 1970, or 0")
    return unix_s


def key(text: str) -> str:
    """Return a valid idempotency key."""
    if not 8 <= len(text.encode()) <= 200 or not text.isprintable():
        raise RefusedError(Code.INVALID_REQUEST, "an idempotency key must have 8 to 200 bytes of printable UTF-8")
    return text


def labels(values: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """Return valid labels of a client, limited in UTF-8 bytes, each label and all together."""
    if len(values) > limits.max_labels:
        raise RefusedError(Code.INVALID_REQUEST, f"{len(values)} labels; at most {limits.max_labels} are accepted")
    for label, text in values.items():
        if not label.isidentifier() or len(label.encode()) > 63:
            raise RefusedError(Code.INVALID_REQUEST, f"label {label[:80]!r}: expected a name such as memory_mb")
        if (size := len(text.encode())) > 200:
            raise RefusedError(Code.INVALID_REQUEST, f"label {label!r} has {size} bytes; at most 200")
        if not text.isprintable():
            raise RefusedError(Code.INVALID_REQUEST, f"label {label!r} is {text!r}; expected printable characters")
    if (size := _num_bytes(*values, *values.values())) > limits.max_label_bytes:
        text = f"the labels have {size} bytes in all; at most {limits.max_label_bytes} are accepted"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return dict(values)


def wait_s(requested_s: float, limits: Limits) -> float:
    """Return how long a long poll may wait: as requested, up to the server's limit."""
    return min(max(requested_s, 0.0), limits.max_wait_s) if math.isfinite(requested_s) else 0.0


def progress(fraction: float) -> float:
    """Return the fraction of an assignment that is done."""
    if not 0.0 <= fraction <= 1.0:  # also refuses NaN
        raise RefusedError(Code.INVALID_REQUEST, f"the progress is {fraction}; expected a fraction between 0 and 1")
    return fraction


def progress_every_s(requested_s: float) -> float:
    """Return the seconds between two progress events of an attempt; 0 disables them."""
    return max(requested_s, MIN_PROGRESS_EVERY_S) if math.isfinite(requested_s) and requested_s > 0.0 else 0.0


def protocol_version(version: int) -> None:
    """Refuse a client of a protocol version that this server does not serve, with those that it does."""
    oldest, newest = wire.OLDEST_PROTOCOL_VERSION, wire.PROTOCOL_VERSION
    if oldest <= version <= newest:
        return
    supported = str(newest) if oldest == newest else f"{oldest} to {newest}"
    older, remedy = ("client", "update the client") if version < oldest else ("server", "update the server first")
    raise RefusedError(
        Code.UNSUPPORTED_VERSION,
        f"the client has protocol version {version}; supported: {supported}. The {older} is older: {remedy}",
    )


def _num_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)
