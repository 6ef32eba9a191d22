"""Blobs in an object store: SeaweedFS."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from pathlib import Path

import pytest

from fedplat_server.errors import BlobError, BlobMissingError, BlobUnavailableError, ConfigError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import blob_objects, files
from fedplat_server.storage.blob_folder import StoredDigests
from fedplat_server.storage.blob_stores import BlobPlace, reconcile
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.storage.ownership import Owner
from support.seaweedfs import SeaweedFS

DATA = b"a model"
DIGEST = hashlib.sha256(DATA).hexdigest()
NAME = blob_objects.name_of(DIGEST)


@pytest.fixture
def url(s3: SeaweedFS) -> str:
    return s3.url()


@pytest.fixture
def place(url: str, tmp_path: Path) -> BlobPlace:
    return BlobPlace(tmp_path / "data", url)


@pytest.fixture
def blobs(place: BlobPlace) -> BlobStore:
    return place.open()


@pytest.fixture
def objects(url: str) -> ObjectStore:
    return ObjectStore(url)


def elsewhere(place: BlobPlace, tmp_path: Path) -> BlobStore:
    """The same blobs on another host, which has no copies."""
    return BlobPlace(tmp_path / "elsewhere", place.url).open()


def put(blobs: BlobStore, data: bytes) -> str:
    digest = blobs.put_chunks([data]).digest
    blobs.settle([digest])
    return digest


def names(objects: ObjectStore) -> set[str]:
    return {stored.name for stored in objects.list()}


def test_what_one_host_stores_another_one_reads(blobs: BlobStore, place: BlobPlace, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"another one")
    assert blobs.put_chunks([DATA[:3], DATA[3:]]) == Blob(DIGEST, len(DATA))
    adopted = blobs.put_file(source)
    other = elsewhere(place, tmp_path)
    assert not other.path(DIGEST).exists()
    assert other.fetch(DIGEST).read_bytes() == DATA
    assert other.fetch(adopted.digest).read_bytes() == b"another one"
    assert other.all_digests() == {DIGEST, adopted.digest}
    assert (other.exists(DIGEST), other.size(DIGEST)) == (True, len(DATA))


def test_a_finished_file_is_moved(blobs: BlobStore, objects: ObjectStore) -> None:
    with blobs.temporary() as path:
        path.write_bytes(DATA)
        assert blobs.adopt_file(path) == Blob(DIGEST, len(DATA))
        assert not path.exists()
    assert objects.read(NAME, 100) == DATA
    assert blobs.path(DIGEST).read_bytes() == DATA


def test_a_blob_that_is_not_there(blobs: BlobStore) -> None:
    assert not blobs.exists(DIGEST)
    for call in (blobs.fetch, blobs.size):
        with pytest.raises(BlobError):
            call(DIGEST)
    with pytest.raises(BlobMissingError):
        blobs.fetch(DIGEST)
    blobs.delete(DIGEST)


def test_a_store_that_does_not_answer_stores_nothing(
    blobs: BlobStore, place: BlobPlace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    away = elsewhere(place, tmp_path)
    with pytest.raises(BlobUnavailableError):
        away.put_chunks([DATA])
    assert [path for path in away.folder.rglob("*") if path.is_file()] == []
    assert blobs.all_digests() == frozenset()


# --- local copies ----------------------------------------------------------------------------------------------


def test_damaged_bytes_are_never_read(blobs: BlobStore, place: BlobPlace, objects: ObjectStore, tmp_path: Path) -> None:
    put(blobs, DATA)
    blobs.path(DIGEST).write_bytes(b"torn")
    again = place.open()
    assert again.fetch(DIGEST).read_bytes() == DATA, "a copy of an earlier process is hashed"
    objects.put(NAME, b"A model")
    with pytest.raises(BlobError, match="damaged in the object store"):
        elsewhere(place, tmp_path).fetch(DIGEST)


async def test_the_copies_used_last_are_kept(place: BlobPlace, objects: ObjectStore, tmp_path: Path) -> None:
    now = [0.0]
    cache = blob_objects.BlobCache(tmp_path / "copies", 2500, lambda: now[0])
    blobs = BlobStore(cache.folder, None, blob_objects.BlobObjects(objects, cache, Instruments()))
    first, second = (put(blobs, os.urandom(1000)) for _ in range(2))
    now[0] += 2 * blob_objects.GRACE_S
    blobs.fetch(first)
    now[0] += 2 * blob_objects.GRACE_S
    put(blobs, os.urandom(1000))
    assert (blobs.path(first).exists(), blobs.path(second).exists()) == (True, False)
    now[0] += 2 * blob_objects.GRACE_S
    async with blobs.local(first) as (path,):
        now[0] += 2 * blob_objects.GRACE_S
        for _ in range(3):
            put(blobs, os.urandom(1000))
            now[0] += 2 * blob_objects.GRACE_S
        assert path.exists(), "it is in use"
        file = path.open("rb")
    for _ in range(2):
        put(blobs, os.urandom(1000))
        now[0] += 2 * blob_objects.GRACE_S
    assert not path.exists()
    with file:
        assert len(file.read()) == 1000, "an open copy stays readable"
    assert sum(each.stat().st_size for each in cache.folder.rglob("*") if each.is_file()) <= 3000
    assert len(blobs.fetch(first).read_bytes()) == 1000


def test_a_blob_that_many_want_is_fetched_once(
    blobs: BlobStore, place: BlobPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(blobs, DATA)
    other, reads = elsewhere(place, tmp_path), list[str]()
    read_parts = ObjectStore.read_parts

    def count(self: ObjectStore, name: str, limit_bytes: int) -> object:
        reads.append(name)
        return read_parts(self, name, limit_bytes)

    monkeypatch.setattr(ObjectStore, "read_parts", count)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(other.fetch, [DIGEST] * 8))
    assert (len(paths), reads) == (1, [NAME])


# --- removal ---------------------------------------------------------------------------------------------------


def test_young_blobs_are_never_removed(blobs: BlobStore, objects: ObjectStore) -> None:
    """Another daemon may have written them, and be about to reference them."""
    put(blobs, DATA)
    before = names(objects)
    assert blobs.remove_orphans(StoredDigests()) == (0, 0)
    with blobs.sweep() as sweep:
        assert sweep.remove([DIGEST]) == 0
    assert names(objects) >= before
    assert objects.read(NAME, 100) == DATA


def test_old_blobs_are_removed_with_their_copies(
    blobs: BlobStore, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_objects, "MIN_AGE_S", 0.0)
    kept, orphan, swept, unsettled = put(blobs, b"1"), put(blobs, b"2"), put(blobs, b"3"), blobs.put_chunks([b"4"])
    objects.put("blobs/README", b"not ours")
    objects.put(f"blobs/{orphan}", b"not ours either")
    with blobs.sweep() as sweep:
        assert sweep.remove([swept, unsettled.digest, DIGEST]) == 1
    stored = StoredDigests(frozenset({kept, unsettled.digest}), frozenset({orphan}))
    assert blobs.remove_orphans(stored) == (1, 0)
    assert blobs.all_digests() == {kept, unsettled.digest}
    assert not blobs.path(swept).exists()
    assert not blobs.path(orphan).exists()
    assert {"blobs/README", f"blobs/{orphan}"} <= names(objects)


def test_unknown_blobs_are_set_aside_and_taken_back(
    place: BlobPlace, blobs: BlobStore, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_objects, "MIN_AGE_S", 0.0)
    put(blobs, DATA)
    aside = f"set-aside/blobs/{DIGEST}"
    assert reconcile(blobs, place, StoredDigests()).orphans == (0, 1)  # the database is an older backup
    assert (blobs.all_digests(), objects.read(aside, 100)) == (frozenset(), DATA)
    assert reconcile(blobs, place, StoredDigests(frozenset({DIGEST}))).copied == 1  # the newer one was put back
    assert objects.read(NAME, 100) == DATA
    blobs.expire()
    assert aside in names(objects)  # it is young
    monkeypatch.setattr(files, "SET_ASIDE_KEEP_S", 0.0)
    blobs.expire()
    assert aside not in names(objects)


def test_a_store_that_lost_its_owner_is_not_given_to_another_database(blobs: BlobStore, objects: ObjectStore) -> None:
    put(blobs, DATA)
    with pytest.raises(ConfigError, match=r"1 models or updates that the database .* does not know"):
        blobs.claim(Owner("other"))
    blobs.claim(Owner("one"), frozenset({DIGEST}))
    assert names(objects) == {NAME, "fedplat.json"}


def test_a_blob_that_is_written_while_it_is_removed_stays(
    blobs: BlobStore, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_objects, "MIN_AGE_S", 0.0)
    put(blobs, DATA)
    delete, writing = ObjectStore.delete, list[concurrent.futures.Future[Blob]]()
    with concurrent.futures.ThreadPoolExecutor(1) as threads, blobs.sweep() as sweep:

        def write_first(self: ObjectStore, names: list[str]) -> None:
            writing.append(threads.submit(blobs.put_chunks, [DATA]))
            delete(self, names)

        monkeypatch.setattr(ObjectStore, "delete", write_first)
        assert sweep.remove([DIGEST]) == len(DATA)
        assert writing[0].result().digest == DIGEST
    assert objects.read(NAME, 100) == DATA
    assert blobs.path(DIGEST).read_bytes() == DATA


# --- the owner -------------------------------------------------------------------------------------------------


def test_a_foreign_store_is_refused_and_nothing_is_removed(
    blobs: BlobStore, place: BlobPlace, objects: ObjectStore, tmp_path: Path
) -> None:
    blobs.claim(Owner("one"))
    blobs.claim(Owner("one"))
    put(blobs, DATA)
    before = names(objects)
    with pytest.raises(ConfigError, match=r"belongs to another database .*'one'.*'other'"):
        elsewhere(place, tmp_path).claim(Owner("other"))
    assert names(objects) == before


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    place = BlobPlace(tmp_path / "data", str(tmp_path / "models"))
    place.open().claim(Owner("one"))
    place.open().claim(Owner("one"))
    with pytest.raises(ConfigError, match="belongs to another database"):
        place.open().claim(Owner("other"))
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["fedplat.json"]


def test_an_owner_that_cannot_be_read(blobs: BlobStore, objects: ObjectStore) -> None:
    objects.put("fedplat.json", b"{")
    with pytest.raises(BlobError, match="damaged"):
        blobs.claim(Owner("one"))


@pytest.mark.slow
def test_each_race_has_one_owner(s3: SeaweedFS, tmp_path: Path) -> None:
    for race in range(20):
        url = s3.url()
        hosts = [BlobPlace(tmp_path / f"{race}-{host}", url).open() for host in range(5)]

        def claim(number: int, hosts: list[BlobStore] = hosts) -> bool:
            try:
                hosts[number].claim(Owner(f"database {number}"))
            except ConfigError:
                return False
            return True

        with concurrent.futures.ThreadPoolExecutor(len(hosts)) as threads:
            assert list(threads.map(claim, range(len(hosts)))).count(True) == 1


# --- the move from a folder ------------------------------------------------------------------------------------


def test_the_models_of_a_data_folder_are_copied(place: BlobPlace, objects: ObjectStore) -> None:
    former = BlobPlace(place.data_dir).open()
    known, unknown, lost = put(former, DATA), put(former, b"an orphan"), "ab" * 32
    blobs = place.open()
    found = reconcile(blobs, place, StoredDigests(frozenset({known, lost})))
    assert (found.copied, found.orphans, found.missing) == (1, (0, 0), frozenset({lost}))
    assert blobs.all_digests() == {known}
    assert former.all_digests() == {known, unknown}
    assert reconcile(blobs, place, StoredDigests(frozenset({known}))).copied == 0
