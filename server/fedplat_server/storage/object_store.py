"""Objects below a URL: S3 and stores with its API, Google Cloud Storage and Azure, by the library obstore.

Everything here blocks, is bounded in time and memory, and may be called from several threads. Errors are translated:
`BlobUnavailableError` (the store does not answer; retry), `BlobFullError` (it has no room) and `BlobError` (anything
else). Messages never include the library's own ones, which may have signatures in URLs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from fedplat import durable, extras
from fedplat_server import instruments, logs
from fedplat_server.errors import BlobError, BlobFullError, BlobMissingError, BlobUnavailableError, ConfigError
from fedplat_server.storage import files

if TYPE_CHECKING:
    import obstore


SCHEMES: Final = ("s3", "gs", "az")
PART_BYTES = 8 << 20
"""Larger objects are sent and received in parts of this size, so that the time-out of a request fits any size."""
_CLOCK = "fedplat-clock"
_MAX_PARTS = 9_000  # S3 allows 10,000
_PARALLEL = 4
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
EXPECTED = "a URL such as s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
_URL = re.compile(r"\S+://\S+")
_NO_RANGE_STATUS = "416"
_FULL_STATUS = "507"
_FULL_CODES = frozenset({
    *("QuotaExceeded", "QuotaExceededException", "InsufficientStorage", "StorageFull", "XMinioStorageFull"),
    *("XMinioAdminBucketQuotaExceeded", "NotEnoughSpace", "DiskFull", "BucketQuotaExceeded"),
})  # fmt: skip
_REFUSED_STATUSES = frozenset({"401", "403"})


def is_url(text: str) -> bool:
    """Return whether a setting names an object store rather than a folder."""
    return text.partition("://")[0] in SCHEMES and "://" in text


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """The bounds of one request with its retries: it fails after about `retry_s + request_s` seconds at most."""

    connect_s: float = 5.0
    request_s: float = 20.0
    retry_s: float = 20.0
    max_retries: int = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """An object in the store. The time is that of the store's clock."""

    name: str
    size_bytes: int
    modified_unix_s: float


class ObjectStore:
    """The objects below `url`, such as s3://bucket/prefix. Names are relative to it.

    Keys and the address of the service come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_ENDPOINT_URL, AWS_REGION, and the variables of GCS and Azure). Raises `ConfigError`.
    """

    def __init__(
        self, url: str, limits: RequestLimits | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.url = url.rstrip("/")
        self.scheme = _check_url(self.url)
        limits = limits or RequestLimits()
        try:
            import obstore
            from obstore.exceptions import BaseError
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"{self.url} needs the Python package {exc.name}; install it with "
                f"{extras.install_command('s3', 'fedplat-server')}"
            ) from exc
        self._errors = (BaseError, ValueError, OSError)
        endpoint = next((environment[name] for name in _ENDPOINTS if environment.get(name)), "")
        try:
            self._store = obstore.store.from_url(
                self.url,
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=limits.connect_s),
                    "timeout": timedelta(seconds=limits.request_s),
                },
                retry_config={
                    "max_retries": limits.max_retries,
                    "retry_timeout": timedelta(seconds=limits.retry_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=min(2.0, limits.retry_s)),
                        "base": 2,
                    },
                },
            )
        except self._errors as exc:
            raise ConfigError(
                f"{self.url} cannot be used ({_first_line(exc)}): correct the URL or the variables of its service"
            ) from None

    def put_file(self, name: str, path: Path) -> None:
        """Store a copy of a file. It exists completely or not at all; an object of this name is replaced."""
        with files.translate_os_errors(f"reading {path}"):
            source = path.open("rb")
        with source as file, self._translate("writing", name):
            size_bytes = os.fstat(file.fileno()).st_size
            self._store.put(
                name,
                file,
                use_multipart=size_bytes > PART_BYTES,
                chunk_size=max(PART_BYTES, -(-size_bytes // _MAX_PARTS)),
                max_concurrency=_PARALLEL,
            )

    def put(self, name: str, data: durable.Bytes, *, create: bool = False) -> bool:
        """Store bytes. With `create`, only if no object has this name: else return False.

        After a lost answer the retry of a create may return False for the caller's own object: read it to be sure.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._translate("writing", name):
            try:
                self._store.put(name, data, mode="create" if create else "overwrite", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def get_file(self, name: str, path: Path, limit_bytes: int) -> int:
        """Copy an object into a new file, and return its size. Raises `BlobError` if it is missing or too large."""
        with files.translate_os_errors(f"writing {path}"), path.open("xb") as file:
            for part in self.read_parts(name, limit_bytes):
                file.write(part)
            return file.tell()

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return an object. Raises `BlobError` if it is missing or too large."""
        return b"".join(self.read_parts(name, limit_bytes))

    def read_beginning(self, name: str, num_bytes: int) -> bytes:
        """Return the first bytes of an object."""
        with self._translate("reading", name):
            first = self._get_first(name, num_bytes)
            return b"" if first is None else bytes(first.bytes())

    def read_parts(self, name: str, limit_bytes: int) -> Iterator[memoryview]:
        """Yield an object in order, in parts; the next one is received meanwhile. Raises as `read` does.

        An object that is replaced meanwhile is an error: all parts are those of one version.
        """
        with self._translate("reading", name):
            first = self._get_first(name)
            if first is None:
                return
            meta = first.meta
            if meta["size"] > limit_bytes:
                raise BlobError(f"{self._where(name)} has {meta['size']} bytes; at most {limit_bytes} are allowed here")
            part = memoryview(first.bytes())
            with ThreadPoolExecutor(1, "object store") as threads:
                for start in range(PART_BYTES, meta["size"], PART_BYTES):
                    coming = threads.submit(self._get_part, name, start, meta)
                    yield part
                    part = coming.result()
                yield part

    def head(self, name: str) -> Stored | None:
        """Return the size and time of an object; None if it does not exist."""
        with self._translate("reading", name):
            try:
                return _to_stored(self._store.head(name))
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """Yield the objects below a folder (`prefix` is a whole part of their names: "aa" has no "aab/c")."""
        with self._translate("listing", prefix):
            for chunk in self._store.list(prefix or None, chunk_size=1000):
                yield from map(_to_stored, chunk)

    def delete(self, names: Collection[str]) -> None:
        """Remove objects, if they exist."""
        if not names:
            return
        with self._translate("removing", next(iter(names))):
            try:
                self._store.delete(list(names))
            except FileNotFoundError:  # of stores without bulk removal: some may be left
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        self._store.delete(name)

    def copy(self, name: str, target: str) -> None:
        """Store a copy of an object, whose bytes stay in the store. Raises `BlobError` if the store cannot copy it."""
        with self._translate("copying", name):
            self._store.copy(name, target)

    def expire(self, prefix: str, age_s: float) -> None:
        """Remove the objects below a folder that were written before a time on the clock of the store."""
        found = list(self.list(prefix))
        if found:
            until = self.read_clock() - age_s
            self.delete([stored.name for stored in found if stored.modified_unix_s <= until])

    def read_clock(self) -> float:
        """Return the time on the clock of the store: that of an object that is written now."""
        self.put(_CLOCK, b"")
        stored = self.head(_CLOCK)
        if stored is None:
            raise BlobError(f"{self.url} does not have what was just written to it")
        return stored.modified_unix_s

    def _get_first(self, name: str, num_bytes: int = PART_BYTES) -> obstore.GetResult | None:
        try:
            return self._store.get(name, options={"range": (0, num_bytes)})
        except self._errors as exc:
            if _find(_STATUS, str(exc)) == _NO_RANGE_STATUS:  # an empty object has no ranges
                return None
            raise

    def _get_part(self, name: str, start: int, meta: obstore.ObjectMeta) -> memoryview:
        end = min(start + PART_BYTES, meta["size"])
        result = self._store.get(name, options={"range": (start, end), "if_match": meta["e_tag"]})
        return memoryview(result.bytes())

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}"

    @contextlib.contextmanager
    def _translate(self, doing: str, name: str) -> Generator[None]:
        try:
            yield
        except BlobError:
            raise
        except self._errors as exc:
            # Without the cause: its message may have a signed URL.
            raise self._explain(f"{doing} {self._where(name)} failed", exc) from None

    def _explain(self, what: str, exc: Exception) -> BlobError:
        text = str(exc)
        status, code = _find(_STATUS, text), _find(_CODE, text)
        answer = f"the store answered {' '.join(part for part in (status, code) if part)}"
        if code in _FULL_CODES or status == _FULL_STATUS:
            instruments.note_full("models")
            return BlobFullError(f"{what}: the store has no room ({answer})")
        if code == "NoSuchBucket":
            return BlobError(f"{what}: there is no such bucket ({answer}); create it, or correct the URL")
        if "169.254.169.254" in text or "metadata" in text.partition("\n")[0]:
            return BlobError(f"{what}: there is no key for the store; set {_KEYS[self.scheme]}")
        if status in _REFUSED_STATUSES:
            return BlobError(
                f"{what}: the key does not allow this ({answer}); check {_KEYS[self.scheme]} and its permissions"
            )
        if isinstance(exc, FileNotFoundError):
            return BlobMissingError(f"{what}: there is no such object")
        if not status or status >= "500":
            reason = answer if status else _first_line(exc).rpartition(" - ")[2]
            hint = "AWS_ENDPOINT_URL, " if self.scheme == "s3" else ""
            return BlobUnavailableError(
                f"{what}: the store does not answer ({reason}); check {hint}the network and the state of the store"
            )
        return BlobError(f"{what}: {answer}")


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"the URL of the object store is not valid ({exc}); expected {EXPECTED}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:  # not repeated: it may have a key
        raise ConfigError(f"the URL of the object store has more than a bucket and a prefix; expected {EXPECTED}")
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise ConfigError(f"{url[:200]!r} is no URL of an object store; expected {EXPECTED}")
    if any(part in ("", ".", "..") for part in parts.path.split("/")[1:]) or not url.isprintable():
        raise ConfigError(f"{url[:200]!r} has a prefix with an empty part, . or ..; expected {EXPECTED}")
    return parts.scheme


def _to_stored(meta: obstore.ObjectMeta) -> Stored:
    return Stored(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _find(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _first_line(exc: Exception) -> str:
    """Return the first line of an error of obstore, without URLs: these may have signatures."""
    return _URL.sub("the store", str(exc).partition("\n")[0])[:300]


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

    def __init__(self, url: str) -> None:
        self.url = url
        self.problem: StoreProblem | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Note whether the operation in the block succeeds."""
        try:
            yield
        except BlobError as exc:
            self._note_failure(_DIGEST.sub(r"\1...", str(exc)))
            raise
        with self._lock:
            before, self.problem = self.problem, None
        if before is not None:
            logs.get().info("the object store works again", store=self.url, failures=before.num_failures)

    def _note_failure(self, text: str) -> None:
        now = time.time()
        with self._lock:
            before = self.problem
            first, since = (1, now) if before is None else (before.num_failures + 1, before.since_unix_s)
            self.problem = StoreProblem(text, first, since, now)
        if before is None:
            logs.get().error("the object store fails", store=self.url, error=text)
