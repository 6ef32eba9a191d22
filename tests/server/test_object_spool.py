"""Updates whose durable copies are in an object store: other hosts, late leaders, and stores that fail."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Generator
from pathlib import Path

import pytest

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.events import JobAction, OperatorCommand
from fedplat_server.errors import BlobError, BlobFullError, BlobUnavailableError, UploadError
from fedplat_server.storage.object_store import ObjectStore, RequestLimits, StoreHealth
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_backend import ObjectBackend, ObjectName
from fedplat_server.storage.spool_file import name_attempt, spool_path_of
from support.rounds.driver import Driver, collecting
from support.seaweedfs import SeaweedFS
from support.store_proxy import AWAY, INTERNAL, LOST_ANSWERS, NO_SPACE, QUOTA, SLOW_DOWN, Fault, StoreProxy, store_proxy

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")
OTHER = KEY._replace(client_id="other")
LATER = KEY._replace(attempt=AttemptKey("job", 1, 3))
ALL_ATTEMPTS = frozenset(name_attempt(key.attempt) for key in (KEY, LATER))
NO_RETRIES = RequestLimits(connect_s=5.0, request_s=20.0, retry_s=1.0, max_retries=0)


class Host:
    """A leader with its own disk, on a store that all hosts share."""

    def __init__(self, folder: Path, url: str, term: int) -> None:
        self.store = ObjectStore(url, NO_RETRIES)
        self.health = StoreHealth(url)
        self.backend = ObjectBackend(self.store, term, self.health, 1 << 20)
        self.spool = Spool(folder / f"host {term}", lambda job_id: job_id == "in memory", self.backend)

    def receive(self, key: AssignmentId = KEY, data: bytes = DATA) -> None:
        digest = hashlib.sha256(data).hexdigest()
        upload = self.spool.open(key, digest, len(data), self.spool.count_received(key, digest))
        upload.write(data)
        upload.close()
        assert self.spool.complete(key, digest) is not None

    def persist(self, key: AssignmentId = KEY) -> None:
        self.receive(key)
        self.spool.persist(key, DIGEST)

    def end(self, *keys: AssignmentId) -> None:
        """What a stored change does that ends assignments."""
        for key in keys:
            self.spool._updates.forget(key)  # pyright: ignore[reportPrivateUsage]
        self.spool._delete(keys)  # pyright: ignore[reportPrivateUsage]
        self.backend.delete(keys)

    def names(self) -> list[str]:
        return sorted(stored.name for stored in self.store.list())


@pytest.fixture
def open_host(tmp_path: Path, s3: SeaweedFS) -> Generator[Callable[..., Host]]:
    hosts: list[Host] = []
    url = s3.url()

    def open_one(term: int, *needed: AssignmentId, known: Collection[str] = ALL_ATTEMPTS) -> Host:
        hosts.append(Host(tmp_path, url, term))
        hosts[-1].spool.keep(needed, known)
        return hosts[-1]

    yield open_one
    for host in hosts:
        host.backend.close()


@pytest.fixture
def proxy(s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Generator[StoreProxy]:
    """What stands between the hosts that are opened now and the store."""
    with store_proxy(s3.endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


def name(term: int, key: AssignmentId = KEY, digest: str = DIGEST) -> str:
    return str(ObjectName.of(term, key, digest))


# --- durable, and found by the next leader -------------------------------------------------------------------


def test_an_update_is_stored_once_before_it_is_accepted(open_host: Callable[..., Host], proxy: StoreProxy) -> None:
    host = open_host(3, KEY)
    host.receive()
    assert host.names() == []
    assert host.spool.persist(KEY, DIGEST) == len(DATA)
    assert host.names() == [name(3)]
    assert host.spool.persist(KEY, DIGEST) == len(DATA)
    assert len([each for each in proxy.requests if each.startswith("PUT")]) == 1


def test_copies_of_unknown_attempts_are_set_aside(open_host: Callable[..., Host]) -> None:
    """The database may be an older backup."""
    first = open_host(1, KEY)
    first.persist()
    second = open_host(2, known=())
    assert second.names() == [f"set-aside/{name(1)}"]
    second.spool.expire()
    assert second.names() == [f"set-aside/{name(1)}", "fedplat-clock"][::-1]  # it is young


def test_updates_in_memory_are_never_stored(open_host: Callable[..., Host]) -> None:
    key = KEY._replace(attempt=AttemptKey("in memory", 1, 1))
    host = open_host(1, key)
    host.persist(key)
    assert host.names() == []


@pytest.mark.fault("F2")
def test_a_leader_with_another_disk_goes_on_with_what_was_accepted(open_host: Callable[..., Host]) -> None:
    first = open_host(1, KEY, OTHER)
    first.persist()
    first.receive(OTHER)  # not reported yet
    shutil.rmtree(first.spool.folder)

    second = open_host(2, KEY, OTHER)
    path = second.spool.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA
    assert second.spool.persist(KEY, DIGEST) == len(DATA)
    assert second.names() == [name(1)], "it is not stored again"
    assert second.spool.complete(OTHER, DIGEST) is None
    assert second.spool.count_received(OTHER, DIGEST) == 0
    second.persist(OTHER)
    assert second.names() == [name(1), name(2, OTHER)]
    second.end(KEY, OTHER)
    assert second.names() == []


def test_the_next_leader_fetches_before_it_is_asked(open_host: Callable[..., Host]) -> None:
    first = open_host(1, KEY, OTHER)
    first.persist(KEY)
    first.persist(OTHER)
    second = open_host(2, KEY, OTHER)
    second.backend.threads.shutdown(wait=True)
    for key in (KEY, OTHER):
        assert spool_path_of(second.spool.folder, key, DIGEST).read_bytes() == DATA


@pytest.mark.fault("F2", "F8")
def test_what_the_disk_has_lost_or_damaged_comes_from_the_store(open_host: Callable[..., Host]) -> None:
    first = open_host(1, KEY, OTHER)
    first.persist(KEY)
    first.persist(OTHER)
    first.spool.folder.rename(first.spool.folder.with_name("host 2"))
    path = spool_path_of(first.spool.folder.with_name("host 2"), KEY, DIGEST)
    path.write_bytes(DATA[:-1] + b"x")
    second = open_host(2, KEY, OTHER)
    for key in (KEY, OTHER):
        found = second.spool.complete(key, DIGEST)
        assert found is not None
        assert found.read_bytes() == DATA


def test_a_copy_that_is_damaged_is_not_taken_for_the_update(open_host: Callable[..., Host]) -> None:
    first = open_host(1, KEY)
    first.persist()
    first.store.put(name(1), DATA[:-1] + b"x")
    second = open_host(2, KEY)
    with pytest.raises(BlobError, match=f"expected {DIGEST}"):
        second.spool.complete(KEY, DIGEST)
    second.spool.expect([LATER])
    second.persist(LATER)  # the others go on
    second.persist()  # and the client may send it again
    path = second.spool.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


def test_a_client_may_send_another_update_that_it_did_not_report_before(open_host: Callable[..., Host]) -> None:
    """Its first report was stored, and the leader died before it accepted it; the client was restarted, too."""
    open_host(1, KEY).persist()
    second = open_host(2, KEY)
    second.backend.threads.shutdown(wait=True)
    other = hashlib.sha256(b"other").hexdigest()
    second.receive(data=b"other")
    second.spool.persist(KEY, other)
    assert second.names() == sorted([name(1), name(2, KEY, other)])
    third = open_host(3, KEY)
    path = third.spool.complete(KEY, other)
    assert path is not None
    assert third.spool.complete(KEY, DIGEST) is None, "the other one was reported"
    assert path.read_bytes() == b"other"
    third.end(KEY)
    assert third.names() == []


def _is_download(method: str, path: str) -> bool:
    return method == "GET" and "/term-" in path


def test_a_copy_replaces_an_upload_that_began_again(open_host: Callable[..., Host], proxy: StoreProxy) -> None:
    open_host(1, KEY).persist()
    proxy.fail(Fault(503, "SlowDown", _is_download))
    second = open_host(2, KEY)
    with pytest.raises(BlobUnavailableError):
        second.spool.complete(KEY, DIGEST)
    upload = second.spool.open(KEY, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    proxy.fail(None)
    path = second.spool.complete(KEY, DIGEST)
    with pytest.raises(UploadError, match="another call continues it"):
        upload.write(DATA[100:])
    assert path is not None
    assert path.read_bytes() == DATA


# --- deleted, but not by a leader that is late ---------------------------------------------------------------


async def test_copies_go_with_their_attempt(open_host: Callable[..., Host]) -> None:
    driver: Driver = collecting(4, goal=4)
    keys = [AssignmentId(driver.key_of(client), client) for client in ("c0", "c1", "c2")]
    host = open_host(1, *(each.id for each in driver.job.open_assignments))
    for key in keys:
        host.persist(key)
    host.spool.on_stored(driver.give_up("c0").changes)
    host.spool.on_stored(driver.report("c1", "c2").changes)
    await asyncio.gather(*host.spool._deletions)  # pyright: ignore[reportPrivateUsage]
    assert host.names() == sorted(name(1, key) for key in keys[1:])
    host.spool.on_stored(driver.do(OperatorCommand("j", JobAction.CANCEL)).changes)
    await host.spool.close()
    assert host.names() == []


def test_a_start_removes_what_is_not_needed_and_nothing_else(open_host: Callable[..., Host]) -> None:
    first = open_host(1, KEY, OTHER, LATER)
    for key in (KEY, OTHER, LATER):
        first.persist(key)
    first.store.put("fedplat.json", b"{}")
    first.store.put("spool/term-1/notes.txt", b"not an update")
    second = open_host(2, OTHER)
    assert second.names() == sorted(["fedplat.json", "spool/term-1/notes.txt", name(1, OTHER)])
    second.end(OTHER)
    assert second.names() == ["fedplat.json", "spool/term-1/notes.txt"]


@pytest.mark.fault("F19", "F20")
def test_a_leader_that_is_late_to_start_removes_nothing_of_the_next_one(open_host: Callable[..., Host]) -> None:
    """It was stopped after it had read its assignments, and the open attempt is not one of them."""
    before = open_host(1, OTHER)
    before.persist(OTHER)
    second = open_host(3, KEY)
    second.persist()
    first = open_host(2)  # continues only now
    assert first.names() == [name(3)]
    path = open_host(4, KEY).spool.complete(KEY, DIGEST)
    assert path is not None


@pytest.mark.fault("F19", "F20")
def test_a_deposed_leader_removes_nothing_that_the_next_one_needs(
    open_host: Callable[..., Host], proxy: StoreProxy
) -> None:
    """Its write fails for it, and reaches the store; the client has reported to the next leader since."""
    first = open_host(1, KEY)
    first.receive()
    proxy.fail(LOST_ANSWERS)
    with pytest.raises(BlobUnavailableError):
        first.spool.persist(KEY, DIGEST)
    proxy.fail(None)
    second = open_host(2, KEY)
    path = second.spool.complete(KEY, DIGEST)
    assert path is not None
    second.spool.persist(KEY, DIGEST)
    first.spool.discard(KEY)
    first.receive(data=b"another update")
    assert second.names() == [name(1)]


@pytest.mark.fault("F19", "F20")
def test_what_a_deposed_leader_stores_late_goes_at_the_next_start(
    open_host: Callable[..., Host], proxy: StoreProxy
) -> None:
    first = open_host(1, KEY)
    first.receive()
    proxy.hold()
    late = in_thread(lambda: first.spool.persist(KEY, DIGEST))
    proxy.wait_for_held(1)
    proxy.pass_later()
    second = open_host(2, KEY)
    second.persist()
    second.end(KEY)
    assert second.names() == []
    proxy.release()
    late.join()
    assert second.names() == [name(1)]
    assert open_host(3).names() == []


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_an_assignment_that_ends_while_its_update_is_stored_leaves_nothing(
    open_host: Callable[..., Host], proxy: StoreProxy
) -> None:
    host = open_host(1, KEY, OTHER)
    host.receive()
    proxy.hold()
    storing = in_thread(lambda: host.spool.persist(KEY, DIGEST))
    proxy.wait_for_held(1)
    host.receive(OTHER)  # no lock is held meanwhile
    host.spool.discard(OTHER)
    ending = in_thread(lambda: host.end(KEY))
    proxy.wait_for_held(2)
    proxy.release()
    storing.join()
    ending.join()
    assert host.names() == []


def test_deletions_that_fail_are_repeated_with_the_next(open_host: Callable[..., Host], proxy: StoreProxy) -> None:
    host = open_host(1, KEY, OTHER)
    host.persist(KEY)
    host.persist(OTHER)
    proxy.fail(Fault(500, "InternalError", lambda method, path: method in ("POST", "DELETE")))
    host.end(KEY)
    assert host.health.problem is not None
    proxy.fail(None)
    assert host.names() == sorted([name(1), name(1, OTHER)])
    host.end(OTHER)
    assert host.names() == []


# --- stores that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        pytest.param(AWAY, BlobUnavailableError, "does not answer", marks=pytest.mark.fault("F52")),
        pytest.param(SLOW_DOWN, BlobUnavailableError, "503 SlowDown", marks=pytest.mark.fault("F52")),
        pytest.param(INTERNAL, BlobUnavailableError, "500 InternalError", marks=pytest.mark.fault("F52")),
        pytest.param(LOST_ANSWERS, BlobUnavailableError, "does not answer", marks=pytest.mark.fault("F52")),
        pytest.param(Fault(403, "AccessDenied"), BlobUnavailableError, "the key does not allow this"),
        pytest.param(Fault(403, "InvalidAccessKeyId"), BlobUnavailableError, "the key does not allow this"),
        pytest.param(Fault(404, "NoSuchBucket"), BlobUnavailableError, "no such bucket"),
        pytest.param(QUOTA, BlobFullError, "no room", marks=pytest.mark.fault("F7")),
        pytest.param(NO_SPACE, BlobFullError, "no room", marks=pytest.mark.fault("F7")),
    ],
    ids=lambda value: f"{value.status} {value.code}{' after' * value.after}" if isinstance(value, Fault) else "",
)
def test_an_update_that_cannot_be_stored_stays_to_be_reported_again(
    open_host: Callable[..., Host], proxy: StoreProxy, fault: Fault, error: type[BlobError], said: str
) -> None:
    host = open_host(1, KEY)
    host.receive()
    proxy.fail(fault)
    for count in (1, 2):
        with pytest.raises(error, match=said):
            host.spool.persist(KEY, DIGEST)
        assert host.health.problem is not None
        assert host.health.problem.num_failures == count
    assert host.spool.count_received(KEY, DIGEST) == len(DATA), "the client need not send it again"
    proxy.fail(None)
    host.spool.persist(KEY, DIGEST)
    assert host.names() == [name(1)]
    assert host.health.problem is None


def test_a_leader_does_not_start_without_its_store(open_host: Callable[..., Host], proxy: StoreProxy) -> None:
    open_host(1, KEY).persist()
    proxy.fail(AWAY)
    with pytest.raises(BlobUnavailableError, match="does not answer"):
        open_host(2, KEY)
