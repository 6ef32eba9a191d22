"""The attempts of secure aggregations for which a client has sent keys: it takes part in each once, also if restarted.

A server that gave out an attempt again would get a second sum of the same clients' updates, under other masks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedplat import durable

MAX_ATTEMPTS = 10_000
"""Number of attempts that are remembered, the latest ones."""
_DIGEST_BYTES = 16


class ServedAttempts:
    """A file with a digest of each attempt, in the order in which the client took part. Methods raise `OSError`.

    The server's name is that of the folder. Attempts are not compared by their numbers, since those of a server that
    was restored from a backup begin again at an earlier one.
    """

    def __init__(self, path: Path, limit: int = MAX_ATTEMPTS) -> None:
        self._path = path
        self._limit = limit

    def is_new(self, job_id: str, round: int, number: int) -> bool:
        """Return whether an attempt was not added yet."""
        return _digest(job_id, round, number) not in self._read()

    def add(self, job_id: str, round: int, number: int) -> bool:
        """Store an attempt durably; return False if it was there before."""
        digests, added = self._read(), _digest(job_id, round, number)
        if added in digests:
            return False
        durable.write_bytes(self._path, b"".join([*digests, added][-self._limit :]))
        return True

    def _read(self) -> list[bytes]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        return [content[begin : begin + _DIGEST_BYTES] for begin in range(0, len(content), _DIGEST_BYTES)]


def _digest(job_id: str, round: int, number: int) -> bytes:
    return hashlib.sha256(f"{round} {number} {job_id}".encode()).digest()[:_DIGEST_BYTES]
