"""What the owner of a client's data has decided of jobs, by their digests, and the files of jobs that were offered.

`approvals.json` is signed with the client's key, and has a counter that grows with each decision. Each line of the
record of what has left the client (`released`) has the counter that was in force, so that an older file, of a backup
for instance, is noticed. The command writes the file whole under a lock of its own, also while the client runs, which
reads it again before each check-in, assignment and upload.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519
from msgspec import Meta, Struct

from fedplat import durable, system
from fedplat.config.decoding import prepare_type
from fedplat_client._state.data_dir import SigningKey
from fedplat_client.errors import DataDirectoryError

_CONTEXT = b"fedplat approvals 1\n"
MAX_DECISIONS = 10_000
MAX_TEXT = 500
"""Longest reason of a rejection, in bytes of UTF-8: that of the texts that servers accept of clients."""
MAX_OFFERS = 1000
"""Largest number of offered jobs whose files are kept; a request names so many."""
Verdict = Literal["approved", "rejected", "revoked"]


class Decision(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What was decided of a job: `at` is the time, in UTC. The limits are of an approval; None: that of the job."""

    verdict: Verdict
    at: str
    max_rounds: Annotated[int, Meta(ge=1)] | None = None
    """Largest number of rounds in which the client takes part."""
    until: str | None = None
    """Last day by the client's clock."""
    max_epsilon: Annotated[float, Meta(gt=0.0)] | None = None
    """Largest epsilon, which the job then has to state."""
    reason: str = ""
    """Of a rejection or a revocation, for the operator of the job."""

    def is_over(self, today: datetime.date) -> bool:
        """Return whether the last day of an approval has passed."""
        return self.until is not None and today > datetime.date.fromisoformat(self.until)


class Decisions(Struct, frozen=True, forbid_unknown_fields=True):
    """All decisions, by the digests of jobs. `counter` is the number of changes."""

    counter: Annotated[int, Meta(ge=0)] = 0
    jobs: Annotated[dict[str, Decision], Meta(max_length=MAX_DECISIONS)] = {}


class _Signed(Struct, frozen=True, forbid_unknown_fields=True):
    decisions: Decisions
    signature: str


class ApprovalFile:
    """The file of one client, signed with its key. Methods raise `DataDirectoryError`."""

    def __init__(self, path: Path, key: SigningKey) -> None:
        self._path = path
        self._key = key
        self._read: tuple[bytes, Decisions] | None = None

    def load(self) -> Decisions:
        """Return the decisions; none if there is no file."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return Decisions()
        except OSError as exc:
            raise DataDirectoryError(f"{self._path} cannot be read: {exc}; make it readable") from exc
        if self._read is None or self._read[0] != content:
            self._read = content, self._verify(content)
        return self._read[1]

    def decide(self, digest: str, decision: Decision) -> Decisions:
        """Store a decision on a job, in place of an earlier one, and return all."""
        with self._lock():
            before = self.load()
            jobs = {**before.jobs, digest: decision}
            if len(jobs) > MAX_DECISIONS:
                raise DataDirectoryError(
                    f"{self._path} has {MAX_DECISIONS} decisions already; expected fewer: use another data directory"
                )
            after = Decisions(before.counter + 1, jobs)
            signed = _Signed(after, self._key.sign(_payload(after)).hex())
            try:
                durable.write_bytes(self._path, msgspec.json.format(msgspec.json.encode(signed)) + b"\n")
            except OSError as exc:
                raise DataDirectoryError(
                    f"{self._path} cannot be written: {exc}; free space or make the folder writable"
                ) from exc
        return after

    def _verify(self, content: bytes) -> Decisions:
        try:
            signed = msgspec.json.decode(content, type=prepare_type(_Signed))
            public = ed25519.Ed25519PublicKey.from_public_bytes(self._key.public)
            public.verify(bytes.fromhex(signed.signature), _payload(signed.decisions))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, InvalidSignature) as exc:
            raise DataDirectoryError(
                f"{self._path} was not written by this client, or was changed since; expected a file with its "
                "signature. Restore it, or delete it and approve the jobs again"
            ) from exc
        return signed.decisions

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        try:
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | system.O_BINARY, 0o600)
        except OSError as exc:
            raise DataDirectoryError(f"{self._path.parent} cannot be written: {exc}; make it writable") from exc
        try:
            system.lock(lock)
            yield
        except OSError as exc:
            raise DataDirectoryError(f"{self._path} cannot be locked: {exc}") from exc
        finally:
            os.close(lock)


def _payload(decisions: Decisions) -> bytes:
    return _CONTEXT + msgspec.json.encode(decisions, order="sorted")


class OfferedFile(Struct, frozen=True, omit_defaults=True):
    """A job that the server has offered: its canonical file, which its digest proves, and what the server says of it.

    `plugins` are those that the file names, as KIND.NAME.
    """

    job_file: str
    initial_digest: str
    job_id: str = ""
    submitter: str = ""
    plugins: tuple[str, ...] = ()


class OfferFiles:
    """A folder with the offers of the server, one file each, named by the digests of the jobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> list[str]:
        """Return the digests, the latest one last."""
        found = [(path.stat().st_mtime_ns, path.stem) for path in self._folder.glob("*.json")]
        return [digest for _, digest in sorted(found)]

    def find(self, digest: str) -> OfferedFile | None:
        """Return the offer of a job; None without one that can be read."""
        try:
            return _DECODER.decode((self._folder / f"{digest}.json").read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def add(self, digest: str, offer: OfferedFile) -> None:
        """Store an offer; the oldest ones give way. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in self.list()[: -MAX_OFFERS + 1]:
            (self._folder / f"{old}.json").unlink(missing_ok=True)
        durable.write_bytes(self._folder / f"{digest}.json", msgspec.json.encode(offer))


_DECODER = msgspec.json.Decoder(OfferedFile)
