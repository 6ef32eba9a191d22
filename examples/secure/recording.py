"""A recording of everything that the server of the demo stores of its clients, and what can be read from it.

The server keeps the clients' messages in its database and their masked updates in its spool, and removes both when the
attempt ends. A trigger of the database copies each message when it is stored; each update gets a second name in the
file system, under which it stays.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.secure_aggregation.encoding import add_file, decode
from fedplat.secure_aggregation.messages import UnmaskAnswer
from fedplat.secure_aggregation.setup import Setup
from fedplat_server.storage import spool_file

POLL_S = 0.02
TABLE = "demo_messages"
COLUMNS = "job_id, round, number, client_id, kind, content"
Vector = npt.NDArray[np.float32]


class Recording:
    """The recording of the server with its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._database = folder / "fedplat.sqlite"
        self._spool = folder / "uploads"
        self.folder = folder / "recording"
        self._stop = threading.Event()

    def add_trigger(self) -> None:
        """Copy each message from now on when it is stored."""
        values = ", ".join(f"NEW.{name}" for name in COLUMNS.split(", "))
        with self._connect() as database:
            database.executescript(
                f"CREATE TABLE {TABLE} ({COLUMNS});"
                f"CREATE TRIGGER {TABLE}_trigger AFTER INSERT ON secure_messages BEGIN "
                f"INSERT INTO {TABLE} VALUES ({values}); END;"
            )

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Keep the files of the spool."""
        self.folder.mkdir()
        thread = threading.Thread(target=self._keep_files, name="recording", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _keep_files(self) -> None:
        while not self._stop.wait(POLL_S):
            for file in self._spool.glob("*/*"):
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    os.link(file, self.folder / file.name)

    def messages(self) -> Iterator[tuple[AssignmentId, str, bytes]]:
        """Yield the messages in the order in which they were stored: of which client, which one, and its bytes."""
        with self._connect() as database:
            for job, round_, number, client, kind, content in database.execute(f"SELECT {COLUMNS} FROM {TABLE}"):
                yield AssignmentId(AttemptKey(job, round_, number), client), kind, content

    def updates(self, keys: Mapping[AssignmentId, object]) -> dict[AssignmentId, Path]:
        """Return the recorded updates of these assignments."""
        names = {spool_file.name_update(key): key for key in keys}
        files = {file.name.partition("-")[0]: file for file in self.folder.iterdir()}
        return {names[name]: file for name, file in files.items() if name in names}

    @contextlib.contextmanager
    def _connect(self) -> Generator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._database, timeout=30.0)) as database, database:
            yield database


def count(recording: Recording) -> dict[str, Any]:
    """Count messages and bytes by kind, and the answered shares of each secret of a client."""
    numbers, sizes = Counter[str](), Counter[str]()
    answered: dict[tuple[AttemptKey, int], Counter[str]] = {}
    for key, kind, content in recording.messages():
        numbers[kind] += 1
        sizes[kind] += len(content)
        if kind == "answer":
            answer = UnmaskAnswer.from_bytes(content)
            for secret, shares in (("seed", answer.seed_shares), ("key", answer.key_shares)):
                for position in shares:
                    answered.setdefault((key.attempt, position), Counter())[secret] += 1
    shares = [number for kinds in answered.values() for number in kinds.values()]
    return {
        "messages": {kind: {"number": numbers[kind], "bytes": sizes[kind]} for kind in sorted(numbers)},
        "clients_with_seed_shares": sum("seed" in kinds for kinds in answered.values()),
        "clients_with_key_shares": sum("key" in kinds for kinds in answered.values()),
        "clients_with_both": sum(len(kinds) == 2 for kinds in answered.values()),
        "shares_of_a_secret": [min(shares, default=0), max(shares, default=0)],
    }


def correlate_single(setup: Setup, file: Path, update: Vector) -> float:
    """Return the correlation of a stored update, decoded as if it were a sum, with the one that its client computed."""
    total = np.zeros(setup.encoding.length, np.uint32)
    add_file(file, setup, total)
    return correlate(decode(setup.encoding, total, 1).update, update)


def correlate(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other) + 1e-30))
