"""Uploads whose digest follows the bytes: known by an id until the report, in each place that updates may be in."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from fedplat.model.file import FilePart
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.coordination import runner
from fedplat_server.errors import RefusedError, UploadError
from fedplat_server.messages import validation
from fedplat_server.rpc import report_intake
from fedplat_server.rpc.report_intake import ReceivedUpdate, receive_update
from fedplat_server.storage import files
from fedplat_server.storage.object_store import ObjectStore, RequestLimits, StoreHealth
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_backend import ObjectBackend, SpoolBackend
from fedplat_server.storage.spool_file import name_attempt, spool_path_of
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, update_of
from support.jobs import job_file

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")
OTHER = KEY._replace(client_id="other")
ID, SECOND_ID = "0123456789abcdef" * 2, "f" * 32
OpenSpool = Callable[[], Spool]


@pytest.fixture(params=["folder", "memory", "objects"])
def open_spool(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[OpenSpool]:
    """Opens the spool of the next life of a server, with the same disk."""
    url = request.getfixturevalue("s3").url() if request.param == "objects" else ""
    backends: list[ObjectBackend] = []

    def open_one() -> Spool:
        backend: SpoolBackend | None = None
        if url:
            store = ObjectStore(url, RequestLimits(connect_s=5.0, request_s=20.0, retry_s=1.0, max_retries=0))
            backend = ObjectBackend(store, len(backends) + 1, StoreHealth(url), 1 << 20)
            backends.append(backend)
        spool = Spool(tmp_path / "uploads", lambda _: request.param == "memory", backend)
        spool.keep([KEY, OTHER], {name_attempt(KEY.attempt)})
        return spool

    yield open_one
    for backend in backends:
        backend.close()


def send(spool: Spool, name: str = ID, data: bytes = DATA, end: int | None = None, key: AssignmentId = KEY) -> None:
    """Send the rest of an update, from where the spool resumes it."""
    received = spool.count_received(key, name)
    upload = spool.open(key, name, len(data), received)
    upload.write(data[received:end])
    if end is None:
        upload.finish()
    upload.close()


def report(spool: Spool, digest: str = DIGEST, upload_id: str = ID) -> object:
    request = fleet_pb2.ReportRequest(digest=digest, upload_id=upload_id)
    return receive_update(spool, KEY, request, lambda part, _: float(len(part.read())))


def test_the_report_declares_the_digest_of_an_upload(open_spool: OpenSpool) -> None:
    spool = open_spool()
    send(spool, end=100)
    assert spool.count_received(KEY, ID) == 100
    send(spool)
    assert spool.complete(KEY, DIGEST) is None, "it was not reported"
    for _ in range(2):  # the first answer gets lost
        assert report(spool) == ReceivedUpdate(len(DATA), float(len(DATA)))
    assert spool.count_received(KEY, ID) == spool.count_received(KEY, DIGEST) == len(DATA)
    path = spool.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA
    with pytest.raises(UploadError, match="was reported for this assignment already"):
        spool.open(KEY, SECOND_ID, len(DATA), 0)


@pytest.mark.fault("F14")
def test_bytes_with_another_digest_than_reported_are_sent_again(open_spool: OpenSpool) -> None:
    """A power failure may leave a file of any bytes."""
    spool = open_spool()
    send(spool, data=DATA[:-1] + b"x")
    with pytest.raises(RefusedError, match="QueryUpload"):
        report(spool)
    assert spool.count_received(KEY, ID) == 0
    send(spool)
    assert report(spool) == ReceivedUpdate(len(DATA), float(len(DATA)))


def test_another_id_begins_another_upload(open_spool: OpenSpool) -> None:
    """The client was restarted and has trained again: its update may have other bytes."""
    spool = open_spool()
    send(spool, data=b"another update")
    send(spool, SECOND_ID)
    assert spool.count_received(KEY, ID) == 0
    with pytest.raises(RefusedError, match="QueryUpload"):
        report(spool, upload_id=ID)
    assert report(spool, upload_id=SECOND_ID) == ReceivedUpdate(len(DATA), float(len(DATA)))


def test_a_restarted_client_replaces_an_update_whose_report_failed(open_spool: OpenSpool) -> None:
    spool = open_spool()
    send(spool, data=b"another update")

    def fail(part: FilePart, _: object) -> float:
        raise OSError(f"{part.path} cannot be read")

    other = fleet_pb2.ReportRequest(digest=hashlib.sha256(b"another update").hexdigest(), upload_id=ID)
    with pytest.raises(OSError, match="cannot be read"):
        receive_update(spool, KEY, other, fail)
    send(spool, SECOND_ID)
    assert report(spool, upload_id=SECOND_ID) == ReceivedUpdate(len(DATA), float(len(DATA)))


@pytest.mark.parametrize("digest", [DIGEST, hashlib.sha256(b"").hexdigest()])
def test_an_upload_that_never_began_cannot_be_reported(open_spool: OpenSpool, digest: str) -> None:
    spool = open_spool()
    with pytest.raises(UploadError):
        spool.open(KEY, ID, len(DATA), 5)
    with pytest.raises(RefusedError, match="QueryUpload"):
        report(spool, digest)


def test_an_id_names_no_upload_of_another_client(open_spool: OpenSpool) -> None:
    spool = open_spool()
    send(spool, key=OTHER)
    assert spool.count_received(KEY, ID) == 0
    with pytest.raises(RefusedError, match="QueryUpload"):
        report(spool)
    send(spool, data=b"mine")
    assert spool.count_received(OTHER, ID) == len(DATA)


@pytest.mark.parametrize("name", ["", "a" * 31, "A" * 32, "../" + "a" * 29, "a" * 33])
def test_an_id_has_a_fixed_form(tmp_path: Path, name: str) -> None:
    assert not files.is_upload_id(name)
    spool = Spool(tmp_path)
    spool.expect([KEY])
    with pytest.raises(UploadError, match="is not a digest"):
        spool.open(KEY, name, 1, 0)
    assert spool.count_received(KEY, name) == 0


@pytest.mark.fault("F2", "F14")
@pytest.mark.parametrize("open_spool", ["folder", "objects"], indirect=True)
def test_the_next_life_continues_with_what_had_arrived(open_spool: OpenSpool) -> None:
    """The server is killed during the upload, before the report, and after the file has got its name."""
    send(open_spool(), end=100)
    spool = open_spool()
    assert spool.count_received(KEY, ID) == 100
    send(spool)
    spool = open_spool()
    assert spool.complete(KEY, DIGEST, ID) is not None
    spool = open_spool()
    assert spool.count_received(KEY, ID) == 0, "its name is its digest now"
    assert report(spool) == ReceivedUpdate(len(DATA), float(len(DATA)))
    spool = open_spool()
    path = spool_path_of(spool.folder, KEY, DIGEST)
    assert spool.complete(KEY, DIGEST) == path
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("open_spool", ["folder"], indirect=True)
def test_what_an_earlier_life_has_left_goes_when_another_upload_begins(open_spool: OpenSpool) -> None:
    spool = open_spool()
    send(spool)
    assert spool.complete(KEY, DIGEST, ID) is not None
    spool = open_spool()
    send(spool, SECOND_ID, b"another update")
    assert sum(path.is_file() for path in spool.folder.rglob("*")) == 1
    spool = open_spool()
    spool.discard(KEY)
    assert not any(path.is_file() for path in spool.folder.rglob("*"))


# --- through the protocol ------------------------------------------------------------------------------------

UPDATE = update_of(initial_model(), 0).to_bytes()


async def working(site: Site) -> tuple[RawClient, str]:
    """A client with an open assignment, whose digest may be last."""
    await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    assignment = await client.assignment()
    assert assignment.digest_last
    return client, assignment.token


@pytest.mark.fault("F14")
async def test_an_upload_by_id_resumes_and_counts_with_its_report(site: Site) -> None:
    client, token = await working(site)
    await client.upload(token, UPDATE, end=100, digest="", upload_id=ID)
    assert await client.query(token, "", upload_id=ID) == 100
    assert await client.query(token, digest_of(UPDATE)) == 0
    await client.upload(token, UPDATE, offset=100, digest="", upload_id=ID)
    assert (await client.report(token, digest_of(UPDATE), upload_id=ID)).HasField("receipt")
    assert (await client.report(token, digest_of(UPDATE))).HasField("receipt"), "whether it was merged"


@pytest.mark.calm("of its calls, only the first one may wait for the disk")
async def test_a_client_that_is_killed_during_its_report_sends_another_update(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, token = await working(site)
    begun, go_on, persist, is_gone = threading.Event(), threading.Event(), Spool.persist, asyncio.Event()

    def wait(spool: Spool, key: AssignmentId, digest: str) -> int:
        begun.set()
        assert go_on.wait(60)
        return persist(spool, key, digest)

    async def finish(call: Coroutine[None, None, Any], note: Callable[[BaseException], None]) -> Any:
        inner = asyncio.create_task(runner.finish(call, note))
        try:
            return await asyncio.shield(inner)
        except asyncio.CancelledError:
            is_gone.set()
            inner.cancel()
            await asyncio.wait([inner])
            raise

    monkeypatch.setattr(Spool, "persist", wait)
    monkeypatch.setattr(report_intake, "finish", finish)
    await client.upload(token, UPDATE, digest="", upload_id=ID)
    call = asyncio.ensure_future(client.report(token, digest_of(UPDATE), upload_id=ID))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    await asyncio.wait([call])
    await is_gone.wait()  # an earlier end of the report would count
    go_on.set()
    await client.open_session()
    token = (await client.assignment()).token
    other = update_of(initial_model(), 1).to_bytes()

    async def is_taken() -> bool:  # as soon as the server has noticed that the caller is gone
        try:
            await client.upload(token, other, digest="", upload_id=SECOND_ID)
        except aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.OUT_OF_RANGE:  # not: this assignment has another update
                raise
            return False
        return True

    await daemons.until(is_taken, "the other update")
    assert (await client.report(token, digest_of(other), upload_id=SECOND_ID)).HasField("receipt")


@pytest.mark.fault("F23")
def test_a_file_for_another_client_has_a_digest() -> None:
    header = fleet_pb2.UploadHeader(receiver="c-0123456789abcdef", name="file", upload_id=ID)
    with pytest.raises(RefusedError, match="one for another client has a digest"):
        validation.upload_name(header)


async def refusal_of(call: aio.Call | object) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    return caught.value.code()


@pytest.mark.fault("F23")
@pytest.mark.parametrize(
    "fields",
    [
        {"upload_id": ID},  # beside the digest
        {"digest": "", "upload_id": ID.upper()},
        {"digest": "", "upload_id": "../../x"},
        {"digest": ""},
    ],
)
async def test_names_that_no_upload_has_are_refused(site: Site, fields: dict[str, Any]) -> None:
    client, token = await working(site)
    assert await refusal_of(client.upload(token, UPDATE, **fields)) is grpc.StatusCode.INVALID_ARGUMENT
    query = {"digest": digest_of(UPDATE)} | fields
    assert await refusal_of(client.query(token, **query)) is grpc.StatusCode.INVALID_ARGUMENT
    if (upload_id := fields.get("upload_id", ID)) != ID:
        report = client.report(token, digest_of(UPDATE), upload_id=upload_id)
        assert await refusal_of(report) is grpc.StatusCode.INVALID_ARGUMENT
