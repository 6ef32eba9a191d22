"""Large updates have a digest of BLAKE3 where both ends have it; the server keeps them as safe as with a SHA-256."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.model import Parameters
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.wire import digests
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.errors import BlobError, RefusedError
from fedplat_server.messages import validation
from fedplat_server.rpc.report_intake import ReceivedUpdate, receive_update
from fedplat_server.storage import files
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_backend import ObjectName
from fedplat_server.storage.spool_file import name_attempt, spool_path_of
from fedplat_server.verify.files import check_spool
from support.daemons import Site, digest_of
from support.jobs import job_file

pytest.importorskip("blake3")
MODEL = Parameters.from_arrays({"weight": np.arange(30_000, dtype=np.float32)})  # too large to be sent inline
DATA = MODEL.to_bytes()
SHA256 = hashlib.sha256(DATA).hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")
ID = digests.BLAKE3 + "0123456789abcdef" * 2


DIGEST = digest_of(DATA, digests.BLAKE3)


def reopen(folder: Path) -> Spool:
    """The spool of the next life of a server."""
    spool = Spool(folder / "uploads")
    spool.keep([KEY], {name_attempt(KEY.attempt)})
    return spool


def send(spool: Spool, end: int | None = None) -> None:
    """Send the rest of an update, from where the spool resumes it."""
    received = spool.count_received(KEY, ID)
    upload = spool.open(KEY, ID, len(DATA), received)
    upload.write(DATA[received:end])
    upload.close()


def report(spool: Spool, digest: str = DIGEST) -> object:
    return receive_update(spool, KEY, fleet_pb2.ReportRequest(digest=digest, upload_id=ID), lambda path, _: 1.0)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has no package `blake3`."""
    monkeypatch.setattr(digests, "has_blake3", lambda: False)


def test_an_update_outlives_the_server_at_every_step(tmp_path: Path) -> None:
    send(reopen(tmp_path), end=100)
    send(reopen(tmp_path))
    assert report(reopen(tmp_path)) == ReceivedUpdate(len(DATA), 1.0)
    path = reopen(tmp_path).complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("digest", [SHA256, digest_of(b"other", digests.BLAKE3)])
@pytest.mark.fault("F14")
def test_bytes_with_another_digest_than_reported_are_sent_again(tmp_path: Path, digest: str) -> None:
    spool = reopen(tmp_path)
    send(spool)
    with pytest.raises(RefusedError, match="QueryUpload"):
        report(spool, digest)
    assert spool.count_received(KEY, ID) == 0
    send(spool)
    assert report(spool) == ReceivedUpdate(len(DATA), 1.0)


def test_verify_reads_the_update_by_its_digest(tmp_path: Path) -> None:
    spool = reopen(tmp_path)
    send(spool)
    report(spool)
    assert list(check_spool(spool.folder, {KEY: DIGEST})) == []
    spool_path_of(spool.folder, KEY, DIGEST).write_bytes(b"damaged")
    ((_, finding),) = check_spool(spool.folder, {KEY: DIGEST})
    assert finding.found == f"its update has the digest {digest_of(b'damaged', digests.BLAKE3)}"


def test_a_copy_is_named_by_the_digest() -> None:
    name = ObjectName.of(3, KEY, DIGEST)
    assert ObjectName.parse(str(name)) == name
    assert ObjectName.parse(str(name).replace("b3:", "b4:")) is None


@pytest.mark.usefixtures("without")
def test_a_server_without_it_says_what_to_install(tmp_path: Path) -> None:
    path = spool_path_of(tmp_path / "uploads", KEY, DIGEST)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    with pytest.raises(BlobError, match=r"which this server lacks: .*blake3"):
        reopen(tmp_path).complete(KEY, DIGEST)
    ((_, finding),) = check_spool(tmp_path / "uploads", {KEY: DIGEST})
    assert (finding.found, "blake3" in finding.expected) == ("its update cannot be checked without BLAKE3", True)
    for check, name in ((validation.update_digest, DIGEST), (validation.upload_id, ID)):
        with pytest.raises(RefusedError, match="this server does not have BLAKE3"):
            check(name)


@pytest.mark.parametrize("text", [f"b3:{'0' * 63}", f"b3:{'A' * 64}", f"b2:{'0' * 64}", f"b3:b3:{'0' * 64}", "b3:"])
def test_names_that_nothing_has_are_refused(text: str) -> None:
    assert not files.names_update(text)
    for check in (validation.update_digest, validation.upload_id):
        with pytest.raises(RefusedError, match="lower-case hexadecimal digits"):
            check(text)


async def test_a_client_may_use_it_for_its_model_and_its_update(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1), MODEL)
    client = await site.enroll()
    assignment = await client.assignment()
    assert (assignment.blake3, assignment.model.digest, assignment.model.blake3) == (True, SHA256, DIGEST)
    upload_id = "b3:" + uuid.uuid4().hex
    await client.upload(assignment.token, DATA, digest="", upload_id=upload_id)
    assert (await client.report(assignment.token, DIGEST, upload_id=upload_id)).HasField("receipt")
    assert (await client.report(assignment.token, DIGEST)).HasField("receipt"), "the first receipt, again"
    await site.operator.until(job, "job", "COMPLETED")
    expected = MODEL.to_vector() * 2
    assert (await site.operator.model(job)).to_vector().tobytes() == expected.tobytes()


@pytest.mark.usefixtures("without")
async def test_without_it_all_is_as_before(site: Site) -> None:
    await site.operator.start(job_file(goal=1), MODEL)
    client = await site.enroll()
    assignment = await client.assignment()
    assert (assignment.blake3, assignment.model.blake3) == (False, "")
    with pytest.raises(aio.AioRpcError) as caught:
        await client.upload(assignment.token, DATA, digest="", upload_id=ID)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await client.upload(assignment.token, DATA)
    assert (await client.report(assignment.token, digest_of(DATA))).HasField("receipt")
