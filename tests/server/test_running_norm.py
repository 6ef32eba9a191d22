"""An update is measured while it is received: its report does not read it again, and has the same norm or refusal."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fedplat import report_validation
from fedplat.model import BLOCK, Parameters
from fedplat.model.file import FilePart
from fedplat.model.running_norm import RunningNorm
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server.errors import UploadError
from fedplat_server.storage.spool import Spool
from support.daemons import Site, digest_of, reason_name
from support.jobs import job_file

MODEL = Parameters.from_arrays({"weight": np.random.default_rng(0).standard_normal(2 * BLOCK + 9).astype(np.float32)})
DATA = MODEL.to_bytes()
DIGEST = hashlib.sha256(DATA).hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    path.write_bytes(DATA)
    return path


def reopen(folder: Path) -> Spool:
    spool = Spool(folder / "uploads")
    spool.expect([KEY])
    return spool


def send(spool: Spool, base: Path, end: int, data: bytes = DATA) -> None:
    """Send what the spool lacks, up to an offset, in random pieces. Ends as an upload does whose line breaks."""
    position, cuts = spool.count_received(KEY, DIGEST), random.Random(end)
    upload = spool.open(KEY, DIGEST, len(data), position, norm=report_validation.running_norm(base, None))
    try:
        while position < end:
            part = data[position : min(position + cuts.randrange(1, 2**18), end)]
            upload.write(part)
            position += len(part)
        if end == len(data):
            upload.finish()
    finally:
        upload.close()


def find(spool: Spool, base: Path) -> object:
    """Return the norm or the refusal of a complete update, which is not read."""
    path = spool.complete(KEY, DIGEST)
    assert path is not None
    with mock.patch.object(report_validation, "ModelFile", side_effect=AssertionError("the update is read again")):
        return report_validation.validate_file(FilePart(path), base, None, spool.find_norm(KEY, DIGEST))


@pytest.mark.parametrize("life", ["one", "several"])
def test_an_upload_that_broke_is_measured(base: Path, tmp_path: Path, life: str) -> None:
    """Also by a restarted server, which measures what is stored while it hashes it."""
    expected = report_validation.validate_file(FilePart(base), base, None)
    spool = reopen(tmp_path)
    for end in (100, 101, 4 * BLOCK + 13, 8 * BLOCK - 2, len(DATA)):
        send(spool, base, end)
        spool = reopen(tmp_path) if life == "several" and end < len(DATA) else spool
    assert isinstance(expected, float)
    assert find(spool, base) == expected


def test_an_upload_that_began_again_is_measured_anew(base: Path, tmp_path: Path) -> None:
    spool = reopen(tmp_path)
    with pytest.raises(UploadError, match="resume at 0"):
        send(spool, base, len(DATA), DATA[:-4] + b"\0\0\xc0\x7f")
    send(spool, base, len(DATA))
    assert find(spool, base) == report_validation.validate_file(FilePart(base), base, None)


def test_another_writer_goes_on_where_the_first_one_was(base: Path, tmp_path: Path) -> None:
    spool, half = reopen(tmp_path), 6 * BLOCK
    first = spool.open(KEY, DIGEST, len(DATA), 0, norm=RunningNorm(MODEL.schema))
    first.write(DATA[:half])
    send(spool, base, len(DATA))  # the first one was not closed
    assert find(spool, base) == report_validation.validate_file(FilePart(base), base, None)


def test_an_update_that_was_measured_for_another_schema_is_read(base: Path, tmp_path: Path) -> None:
    spool, other = reopen(tmp_path), tmp_path / "other"
    other.write_bytes(Parameters.from_arrays({"other": np.ones(2 * BLOCK + 9, np.float32)}).to_bytes())
    send(spool, other, len(DATA))
    path, expected = spool.complete(KEY, DIGEST), report_validation.validate_file(FilePart(base), base, None)
    assert path is not None
    assert report_validation.validate_file(FilePart(path), base, None, spool.find_norm(KEY, DIGEST)) == expected


async def test_a_report_is_answered_without_a_second_pass(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_validation, "ModelFile", mock.Mock(side_effect=AssertionError("it is read again")))
    job = await site.operator.start(job_file(goal=1), MODEL)
    client = await site.enroll()
    token = (await client.assignment()).token
    await client.upload(token, DATA)
    assert (await client.report(token, digest_of(DATA))).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


async def test_an_update_with_a_nan_is_refused_without_a_second_pass(site: Site) -> None:
    await site.operator.start(job_file(goal=1), MODEL)
    client = await site.enroll()
    token, data = (await client.assignment()).token, DATA[:-4] + b"\0\0\xc0\x7f"
    await client.upload(token, data)
    with mock.patch.object(report_validation, "ModelFile", side_effect=AssertionError("it is read again")):
        answer = await client.report(token, digest_of(data))
    assert reason_name(answer.refusal.reason) == "REJECTED_NONFINITE"
