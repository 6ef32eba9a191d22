"""Files that silos send each other through the server: which are kept, and where an upload resumes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedplat.rounds import AttemptKey
from fedplat_server.errors import UploadError
from fedplat_server.storage.spool_file import RelayedFile, RelayStore, name_attempt

CONTENT = b"encrypted" * 100
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FIRST, SECOND = AttemptKey("j-1", 1, 1), AttemptKey("j-1", 1, 2)


def file_of(attempt: AttemptKey, sender: str = "a", receiver: str = "b") -> RelayedFile:
    return RelayedFile(attempt, sender, receiver, "model")


def send(store: RelayStore, key: RelayedFile, content: bytes = CONTENT, end: int | None = None) -> None:
    digest = hashlib.sha256(content).hexdigest()
    upload = store.open(key, digest, len(content), store.count_received(key, digest))
    upload.write(content[store.count_received(key, digest) : end])
    upload.close()


def test_an_upload_resumes_also_in_the_next_process(tmp_path: Path) -> None:
    store = RelayStore(tmp_path)
    store.keep([FIRST])
    assert (store.count_received(file_of(FIRST), DIGEST), store.find(file_of(FIRST))) == (0, None)
    send(store, file_of(FIRST), end=100)
    assert store.count_received(file_of(FIRST), DIGEST) == 100
    assert store.count_received(file_of(FIRST), "f" * 64) == 0  # of another file nothing was received
    assert store.count_received(file_of(FIRST, "b", "a"), DIGEST) == 0
    assert store.find(file_of(FIRST)) is None
    store = RelayStore(tmp_path)
    store.keep([FIRST])
    assert store.count_received(file_of(FIRST), DIGEST) == 100
    with pytest.raises(UploadError, match="resume at 100"):
        store.open(file_of(FIRST), DIGEST, len(CONTENT), 50)
    send(store, file_of(FIRST))
    path = store.find(file_of(FIRST))
    assert path is not None
    assert path.read_bytes() == CONTENT


def test_a_start_keeps_the_files_of_open_attempts_alone(tmp_path: Path) -> None:
    store = RelayStore(tmp_path)
    store.keep([FIRST, SECOND])
    for attempt in (FIRST, SECOND):
        send(store, file_of(attempt))
    (tmp_path / "stray").write_bytes(b"left by a crash")
    store = RelayStore(tmp_path)
    store.keep([SECOND], {name_attempt(FIRST)})
    assert (store.find(file_of(FIRST)), store.find(file_of(SECOND)) is not None) == (None, True)
    assert len(list(tmp_path.iterdir())) == 2  # "stray" is the operator's
    with pytest.raises(UploadError, match="the attempt has ended"):
        send(store, file_of(FIRST))


def test_an_upload_of_other_bytes_replaces_a_file_and_fences_its_writer(tmp_path: Path) -> None:
    store = RelayStore(tmp_path)
    store.keep([FIRST])
    first = store.open(file_of(FIRST), DIGEST, len(CONTENT), 0)
    send(store, file_of(FIRST), b"other bytes")
    with pytest.raises(UploadError):
        first.write(CONTENT)
    path = store.find(file_of(FIRST))
    assert path is not None
    assert path.read_bytes() == b"other bytes"
    with pytest.raises(UploadError, match="is not a digest"):
        store.open(file_of(FIRST), "../../escape", 1, 0)
