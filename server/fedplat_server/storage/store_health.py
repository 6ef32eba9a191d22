"""Whether an object store works, as its last operation shows."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from fedplat_server import logs
from fedplat_server.errors import BlobError

_DIGEST = re.compile("([0-9a-f]{8})[0-9a-f]{56}")  # is abbreviated: names are longer than the reason


class StoreProblem(NamedTuple):
    """Why operations fail, how many have failed in a row, when the first and the last one did."""

    text: str
    num_failures: int
    since_unix_s: float
    last_unix_s: float


class StoreHealth:
    """The outcome of the operations on a store. It may be used from several threads.

    `problem` is None after a success. The log gets the first failure and the first success after it.
    """

    def __init__(self, url: str, unix_s: Callable[[], float] = time.time) -> None:
        self.url = url
        self.problem: StoreProblem | None = None
        self._unix_s = unix_s
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Note whether the operation in the block succeeds."""
        try:
            yield
        except BlobError as exc:
            self._note_failure(_DIGEST.sub(r"\1...", str(exc)))
            raise
        self._note_success()

    def _note_failure(self, text: str) -> None:
        now = self._unix_s()
        with self._lock:
            before = self.problem
            first, since = (1, now) if before is None else (before.num_failures + 1, before.since_unix_s)
            self.problem = StoreProblem(text, first, since, now)
        if before is None:
            logs.get().error("the object store fails", store=self.url, error=text)

    def _note_success(self) -> None:
        with self._lock:
            before, self.problem = self.problem, None
        if before is not None:
            logs.get().info("the object store works again", store=self.url, failures=before.num_failures)
