from __future__ import annotations

import concurrent.futures
import os
import socket
from pathlib import Path

import pytest

from fedplat_server.errors import BlobError, BlobUnavailableError, ConfigError
from fedplat_server.storage.object_store import PART_BYTES, ObjectStore, RequestLimits, is_url
from support.seaweedfs import SeaweedFS

LIMIT = 1 << 30
PATIENCE = RequestLimits(connect_s=0.5, request_s=0.5, retry_s=0.5, max_retries=1)


@pytest.fixture
def store(s3: SeaweedFS) -> ObjectStore:
    return ObjectStore(s3.url())


@pytest.mark.parametrize("size_bytes", [0, 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES + 17])
def test_files_come_back_as_they_were(store: ObjectStore, tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "sent").write_bytes(data)
    store.put_file("a/b", tmp_path / "sent")
    stored = store.head("a/b")
    assert stored is not None
    assert (stored.name, stored.size_bytes) == ("a/b", size_bytes)
    assert store.get_file("a/b", tmp_path / "received", LIMIT) == size_bytes
    assert (tmp_path / "received").read_bytes() == data
    assert store.read("a/b", LIMIT) == data


def test_objects_are_listed_below_a_folder_and_removed(store: ObjectStore) -> None:
    assert list(store.list()) == []
    for name in ("aa/x", "aa/y/z", "aab/x"):
        store.put(name, name.encode())
    assert {each.name: each.size_bytes for each in store.list("aa")} == {"aa/x": 4, "aa/y/z": 6}
    store.delete(["aa/x", "aab/x", "no such object"])
    assert [each.name for each in store.list()] == ["aa/y/z"]
    assert store.head("aa/x") is None
    store.delete([])


def test_a_store_sees_only_its_prefix(s3: SeaweedFS) -> None:
    one, other = ObjectStore(s3.url()), ObjectStore(s3.url())
    one.put("x", b"1")
    assert other.head("x") is None
    assert list(other.list()) == []


def test_too_much_and_nothing_are_errors(store: ObjectStore, tmp_path: Path) -> None:
    store.put("x", b"12345")
    with pytest.raises(BlobError, match="has 5 bytes; at most 4"):
        store.read("x", 4)
    with pytest.raises(BlobError, match="there is no such object"):
        store.read("y", 4)
    with pytest.raises(BlobError, match=r"reading .*missing failed"):
        store.put_file("x", tmp_path / "missing")


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(store: ObjectStore) -> None:
    store.put("x", bytes(3 * PART_BYTES))
    parts = store.read_parts("x", LIMIT)
    assert next(parts) == bytes(PART_BYTES)
    store.put("x", os.urandom(3 * PART_BYTES))
    with pytest.raises(BlobError, match="412"):
        list(parts)


@pytest.mark.slow
def test_one_of_many_creates_wins(store: ObjectStore) -> None:
    with concurrent.futures.ThreadPoolExecutor(10) as threads:
        tries = [threads.submit(store.put, "x", b"%d" % number, create=True) for number in range(10)]
        made = [each.result() for each in tries]
    assert made.count(True) == 1
    assert store.read("x", 100) == b"%d" % made.index(True)


@pytest.mark.parametrize(("name", "code"), [
    ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"),
])  # fmt: skip
def test_a_wrong_key_is_named_but_not_shown(
    s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    monkeypatch.setenv(name, "wrong-and-secret")
    store = ObjectStore(s3.url())
    for call in (lambda: store.put("x", b""), lambda: store.read("x", 1), lambda: list(store.list())):
        with pytest.raises(BlobError, match=f"403 {code}.*check AWS_ACCESS_KEY_ID and AWS_SECRET") as caught:
            call()
        assert "wrong-and-secret" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_bucket_that_does_not_exist(s3: SeaweedFS) -> None:
    with pytest.raises(BlobError, match="no such bucket"):
        ObjectStore("s3://missing/x").put("x", b"")


@pytest.mark.slow
def test_a_store_that_is_away_or_silent(s3: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        for _ in range(2):  # first nothing listens, then nothing answers
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            store = ObjectStore(s3.url(), PATIENCE)
            for call in (lambda: store.put("x", b""), lambda: store.head("x"), lambda: store.delete(["x"])):  # noqa: B023
                with pytest.raises(BlobUnavailableError, match="does not answer"):
                    call()
            silent.listen()


@pytest.mark.parametrize(("url", "message"), [
    ("s3://", "is no URL"),
    ("ftp://bucket/x", "is no URL"),
    ("s3://key:secret@bucket/x", "more than a bucket and a prefix"),
    ("s3://bucket/x?secret=1", "more than a bucket and a prefix"),
    ("s3://bucket/../x", "a prefix with"),
    ("s3://bucket//x", "a prefix with"),
])  # fmt: skip
def test_urls_that_cannot_be_used(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ObjectStore(url)
    assert "secret" not in str(caught.value)


def test_what_is_a_url() -> None:
    assert [is_url(text) for text in ("s3://b", "gs://b/p", "az://c", "/data/blobs", "blobs", "s3")] == [True] * 3 + [
        False
    ] * 3
