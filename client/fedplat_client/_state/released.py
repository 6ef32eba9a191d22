"""The record of what has left a client: a line is on the disk before what it names is sent.

Each line is a JSON object that ends with its `hash`: the SHA-256 of the hash of the line before and of its own text
without it. So a line that is changed, removed or moved breaks the chain there; lines that are removed at the end do
not, so compare the last hash with one that was noted elsewhere. A crash may leave a line of something that was never
sent, and part of a last line, which the next one replaces; it never leaves less than was sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from fedplat import durable, system, texts
from fedplat_client._state import model_cache

ReleasedContent = Literal["update", "digest", "metrics", "announcement", "model", "ring", "failure", "decision"]
"""What a line names: an update; the digest of the update of the line before, which was computed while it was sent; the
metrics of an evaluation; what a silo tells of its model; its model or a mean for another silo; the chunks of a ring;
the text of a failure; nothing, after the owner has decided on a job."""
_FIRST = "0" * 64
_HASH = b',"hash":"'
_HASH_BYTES = len(_HASH) + 64 + len(b'"}')
_MAX_LINE = 2**20
_logger = logging.getLogger(__name__)


class Protection(Struct, frozen=True, omit_defaults=True):
    """What hides an update: masks under which the server learns only sums of at least `min_clients` of them.

    `noise_multiplier` is that of the noise in such a sum that clients have added themselves.
    """

    masked: bool = False
    min_clients: int = 1
    noise_multiplier: float = 0.0


PLAIN = Protection()


class ReleasedItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is sent. `receiver` is the id of another client; empty: the server. Sizes are in bytes.

    `digest` is that under which the receiver has the content: SHA-256, or with its name another one.
    """

    content: ReleasedContent
    receiver: str = ""
    size_bytes: int = 0
    digest: str = ""
    num_examples: float = 0.0
    metrics: dict[str, float] = {}
    protection: Protection = PLAIN


class ReleasedLine(ReleasedItem, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the record: what is sent, when by the client's clock (UTC), and for which task."""

    time: str
    job_id: str
    job: str
    round: int
    attempt: int
    trainer: str
    job_digest: str = ""
    """The digest of the job; empty if the owner of the client does not approve jobs."""
    base_digest: str = ""
    """The SHA-256 of the model that the task began with, if the line has the digest of the job."""
    approvals: int = 0
    """The number of the owner's last decision then, which finds an older `approvals.json`."""


class ReleaseRecord:
    """The file of one client, which only its process writes. `give_way` frees space on a full disk."""

    def __init__(self, path: Path, give_way: model_cache.GiveWay = lambda: False) -> None:
        self.path = path
        self._give_way = give_way
        self._lock = threading.Lock()
        self._end: tuple[int, str] | None = None

    def add(self, release: ReleasedLine) -> None:
        """Append a line, and return when it is on the disk. Raises `OSError`; then nothing of it may be sent."""
        with self._lock:
            model_cache.write_bounded(lambda: self._append(release), self._give_way)

    def _append(self, release: ReleasedLine) -> None:
        is_new = not self.path.exists()
        flags = os.O_RDWR | os.O_CREAT | system.O_BINARY
        with open(os.open(self.path, flags, 0o600), "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            # The owner may have moved the file away since: then another chain begins.
            end, before = self._end if self._end and self._end[0] == size else _find_end(file, size)
            text = msgspec.json.encode(release)
            hash_ = _chain(before, text)
            line = text[:-1] + _HASH + hash_.encode() + b'"}\n'
            self._end = None
            try:
                file.truncate(end)
                file.seek(end)
                durable.write_all(file.fileno(), line)
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        if is_new:
            durable.sync(self.path.parent)
        self._end = end + len(line), hash_


def _find_end(file: io.FileIO, size: int) -> tuple[int, str]:
    """Return where the next line begins, and the hash of the line before. Raises `OSError` for another file."""
    start = max(0, size - 2 * _MAX_LINE)
    file.seek(start)
    tail = file.read(size - start)
    whole = tail.rfind(b"\n") + 1
    if whole < len(tail):
        _logger.warning("The last line of the record of what has left the client is incomplete, and is replaced.")
    if not whole:
        if start:
            raise OSError(errno.EINVAL, "the last line of the record is not one of its lines; move the file aside")
        return 0, _FIRST
    last = tail[tail.rfind(b"\n", 0, whole - 1) + 1 : whole - 1]
    return start + whole, _split(last)[1]


def _split(line: bytes) -> tuple[bytes, str]:
    """Return the text and the hash of a line. Raises `OSError` for another one."""
    text, end = line[:-_HASH_BYTES], line[-_HASH_BYTES:]
    if not (text.startswith(b"{") and end.startswith(_HASH) and end.endswith(b'"}')):
        raise OSError(
            errno.EINVAL, "a line of the record is not one that this program has written; move the file aside"
        )
    return text + b"}", end[len(_HASH) : -2].decode("ascii", "replace")


def _chain(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()


@dataclasses.dataclass(frozen=True)
class Site:
    """The client that reports: its server and population, and the record of what has left it."""

    server: str
    population: str
    record: Path


def read(path: Path) -> Iterator[ReleasedLine]:
    """Yield the complete lines of a record; none if there is no file. Raises `OSError`, `msgspec.DecodeError`."""
    for line in _read_lines(path):
        if line.endswith(b"\n"):
            yield _DECODER.decode(line)


def read_part(path: Path, start: int, end: int) -> Iterator[ReleasedLine]:
    """Yield the lines from number `start` (the first is 0) to `end`; only these are decoded. Raises as `read` does."""
    for line in itertools.islice(_read_lines(path), start, end):
        if line.endswith(b"\n"):
            yield _DECODER.decode(line)


def _read_lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from file


_DECODER = msgspec.json.Decoder(ReleasedLine)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The number of lines of a record that are as they were written, and the hash of the last one of them.

    `wrong` is the number of the first line that is not, from 1; 0 without one. A last line that `is_cut` is one of
    a crash, whose content was not sent, or was cut since.
    """

    num_lines: int
    head: str
    wrong: int = 0
    is_cut: bool = False

    def describe_unchanged(self) -> str:
        """Return what is as it was written, in words without a period."""
        head = f"; the last hash is {self.head}" if self.num_lines else ""
        cut = ". One more was cut: by a crash, before its content was sent, or since" if self.is_cut else ""
        return f"{texts.format_count(self.num_lines, 'line')}, unchanged and in their order{head}{cut}"


def verify(path: Path) -> Verification:
    """Check each line of a record. Raises `OSError` if it cannot be read."""
    before, number = _FIRST, 0
    for line in _read_lines(path):
        if not line.endswith(b"\n"):
            return Verification(number, before, is_cut=True)
        try:
            text, found = _split(line[:-1])
        except OSError:
            return Verification(number, before, number + 1)
        if _chain(before, text) != found:
            return Verification(number, before, number + 1)
        before, number = found, number + 1
    return Verification(number, before)
