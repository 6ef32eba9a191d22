"""The local copies of blobs: which are kept, which are verified, and which make room."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedplat_server.errors import BlobError
from fedplat_server.storage.blob_objects import GRACE_S, BlobCache

CONTENTS = [bytes([number]) * 100 for number in range(4)]
DIGESTS = [hashlib.sha256(content).hexdigest() for content in CONTENTS]


class Place:
    """A folder of copies with a clock, and a store that counts what is read from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.reads: list[str] = []
        self.contents = dict(zip(DIGESTS, CONTENTS, strict=True))

    def open(self, limit_bytes: int = 1000) -> BlobCache:
        return BlobCache(self.folder, limit_bytes, lambda: self.now)

    def read(self, digest: str, limit_bytes: int) -> Iterable[memoryview]:
        self.reads.append(digest)
        return [memoryview(self.contents[digest])]

    def copies(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "cache")


def test_the_copies_of_an_earlier_process_are_verified_and_not_fetched(place: Place) -> None:
    for digest in DIGESTS[:2]:
        place.open().get(digest, place.read)
    cache = place.open()
    assert not cache.has(DIGESTS[0])
    assert cache.get(DIGESTS[0], place.read).read_bytes() == CONTENTS[0]
    assert cache.has(DIGESTS[0])
    assert place.reads == DIGESTS[:2]
    cache.path(DIGESTS[1]).write_bytes(b"damaged")
    assert cache.get(DIGESTS[1], place.read).read_bytes() == CONTENTS[1]
    assert place.reads == [*DIGESTS[:2], DIGESTS[1]]


def test_a_copy_that_another_daemon_has_removed_is_fetched_again(place: Place) -> None:
    cache = place.open()
    cache.get(DIGESTS[0], place.read).unlink()
    assert not cache.has(DIGESTS[0])
    assert cache.get(DIGESTS[0], place.read).read_bytes() == CONTENTS[0]


def test_a_start_makes_room_and_leaves_other_files_alone(place: Place) -> None:
    cache = place.open()
    for at, digest in enumerate(DIGESTS):
        os.utime(cache.get(digest, place.read), (at, at))
    (place.folder / "README").write_text("not a copy")
    misplaced = place.folder / DIGESTS[0]
    misplaced.write_bytes(CONTENTS[0])
    place.now = 2 * GRACE_S
    cache.path(DIGESTS[3]).touch()
    place.open(limit_bytes=250)
    assert {path.name for path in place.folder.glob("??/??/*")} == set(DIGESTS[2:])
    assert place.copies() == {"README", DIGESTS[0], *DIGESTS[2:]}


def test_the_copies_that_were_not_used_for_longest_make_room(place: Place) -> None:
    """But neither those that are held, nor those whose path was handed out a moment ago."""
    cache = place.open(limit_bytes=200)
    with cache.hold([DIGESTS[0]]):
        for digest in DIGESTS[:3]:
            cache.get(digest, place.read)
        assert place.copies() == set(DIGESTS[:3])
        place.now = GRACE_S - 1.0
        cache.get(DIGESTS[1], place.read)
        place.now = GRACE_S
        cache.get(DIGESTS[3], place.read)
        assert place.copies() == {DIGESTS[0], DIGESTS[1], DIGESTS[3]}
    place.now = 3 * GRACE_S
    cache.get(DIGESTS[2], place.read)
    assert place.copies() == set(DIGESTS[2:])


def test_a_blob_that_is_damaged_in_the_store_is_no_copy(place: Place) -> None:
    place.contents[DIGESTS[0]] = b"other bytes"
    with pytest.raises(BlobError, match="is damaged in the object store"):
        place.open().get(DIGESTS[0], place.read)
    assert place.copies() == set()
