"""`verify` finds files that are damaged or missing, and notes those that are not needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedplat.rounds.invariants.records import Location
from fedplat_server.storage.files import list_files
from fedplat_server.verify.inspection import verify
from support.verify.places import Place


def _replaced(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def _shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: Sequence[tuple[Callable[[Path], None], str]] = (
    (Path.unlink, "is not there"),
    (_a_folder, "is not there"),
    (_replaced, "has the digest"),
    (_shortened, "bytes in"),
)


def test_files_that_are_removed_while_they_are_listed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon removes the folder of an attempt, and single uploads, at any time."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert list_files(tmp_path / "missing") == []
    assert list_files(tmp_path) == [tmp_path / "a" / "file", tmp_path / "b" / "file"]
    scandir = os.scandir

    def remove_the_other(path: str) -> object:
        if (name := Path(path).name) in ("a", "b"):
            monkeypatch.undo()  # rmtree lists folders, too
            shutil.rmtree(tmp_path / ("b" if name == "a" else "a"))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_the_other)
    (left,) = list_files(tmp_path)
    assert left.name == "file"


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        list_files(tmp_path)


def as_literal(place: Place, content: bytes) -> str:
    """Bytes in SQL."""
    return f"X'{content.hex()}'" if place.database.startswith("sqlite") else f"decode('{content.hex()}', 'hex')"


WHAT = {"digest": "its model", "state_digest": "its optimizer's state", "delta_digest": "its delta"}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["digest", "state_digest", "delta_digest"])
async def test_what_is_broken_in_the_blobs_is_found(
    place: Place, which: str, damage: tuple[Callable[[Path], None], str]
) -> None:
    path, (do, said) = place.blob(which, "done", 1), damage
    place.execute("DELETE FROM blob_contents")  # small ones are rows, too
    do(path)
    report = await verify(place.database, place.folder)
    if which == "state_digest" and said == "bytes in":
        said = "has the digest"  # its expected size is not stored
    (finding,) = report.findings
    assert (finding.invariant, finding.place) == ("I2", Location(place.jobs["done"], version=1))
    assert said in finding.found
    assert finding.found.startswith(WHAT[which])


@pytest.mark.parametrize(("damage", "_"), DAMAGES)
async def test_a_damaged_file_of_a_blob_that_is_a_row_is_a_note(
    place: Place, damage: Callable[[Path], None], _: str
) -> None:
    damage(place.blob("digest", "done", 1))
    report = await verify(place.database, place.folder)
    assert report.findings == []
    assert report.notes == [
        "1 files of models are missing or damaged; the next start of the daemon writes them again from the database"
    ]


async def test_a_damaged_row_of_a_blob_is_found(place: Place) -> None:
    path = place.blob("digest", "done", 1)
    place.execute(f"UPDATE blob_contents SET content = {as_literal(place, b'other')} WHERE digest = '{path.name}'")
    (finding,) = (await verify(place.database, place.folder)).findings
    assert (finding.check, finding.place) == ("blob_rows", Location(place.jobs["done"], version=1))
    path.unlink()
    second, other = (await verify(place.database, place.folder)).findings
    assert (second, other.check) == (finding, "blobs")


async def test_rows_that_are_not_needed_are_a_note(place: Place) -> None:
    place.execute(f"INSERT INTO blob_contents VALUES ('{'0' * 64}', {as_literal(place, b'other')})")
    report = await verify(place.database, place.folder)
    assert (report.findings, report.notes) == (
        [],
        ["1 rows of updates and models are not needed; the next start of the daemon removes them"],
    )


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_the_row_of_an_update_replaces_its_file(place: Place, is_damaged: bool) -> None:
    (path,) = (path for path in (place.folder / "uploads").rglob("*") if path.is_file())
    digest, content = path.name.rpartition("-")[2], path.read_bytes()
    path.unlink()
    place.execute(
        "INSERT INTO update_contents SELECT job_id, round, number, client_id, digest, "
        f"{as_literal(place, content[is_damaged:])} FROM assignments WHERE digest = '{digest}' "
        "AND state = 'REPORTED'"
    )
    findings = (await verify(place.database, place.folder)).findings
    assert [(each.invariant, each.check) for each in findings] == [("I3", "update_rows")] * is_damaged


@pytest.mark.parametrize("damage", [Path.unlink, _replaced, _shortened])
async def test_what_is_broken_in_the_spool_is_found(place: Place, damage: Callable[[Path], None]) -> None:
    (path,) = (path for path in (place.folder / "uploads").rglob("*") if path.is_file())
    damage(path)
    report = await verify(place.database, place.folder)
    (finding,) = report.findings
    assert (finding.invariant, finding.check, finding.place.job) == ("I3", "spooled", place.jobs["open"])
    assert finding.place.client


async def test_files_that_are_not_needed_are_notes(place: Place) -> None:
    blobs = place.folder / "blobs"
    (blobs / "left.tmp").write_bytes(b"torn")
    (blobs / "00" / "00").mkdir(parents=True)
    (blobs / "00" / "00" / ("0" * 64)).write_bytes(b"orphan")
    report = await verify(place.database, place.folder)
    assert report.findings == []
    assert report.notes == [
        "1 blobs belong to no version; the next start of the daemon removes them, or sets them aside if the database "
        "never had them",
        f"the file left.tmp in {blobs} is not a blob",
    ]


async def test_uploads_that_are_not_needed_are_notes(place: Place) -> None:
    uploads = place.folder / "uploads"
    (spooled,) = (path for path in uploads.rglob("*") if path.is_file())
    (uploads / "left.tmp").write_bytes(b"torn")
    (spooled.parent / "left.tmp").write_bytes(b"torn")
    ended = uploads / ("0" * 64)
    ended.mkdir()
    (ended / spooled.name).write_bytes(b"of an attempt that has ended")
    (spooled.parent / ("0" * 64 + spooled.name[64:])).write_bytes(b"of a client that takes no part")
    report = await verify(place.database, place.folder)
    assert report.findings == []
    assert report.notes == [
        "2 uploads belong to no open assignment; they are removed with the attempt, or by the next start of the daemon",
        f"the file {(spooled.parent / 'left.tmp').relative_to(uploads)} in {uploads} is not an upload",
        f"the file left.tmp in {uploads} is not an upload",
    ]
