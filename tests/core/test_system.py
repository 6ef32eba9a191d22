"""The substitutes for what a system does not have; tests/portability runs the product on them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from fedplat import system


@pytest.mark.parametrize("hidden", [(), ("pread", "preadv", "pwrite")], ids=["linux", "windows"])
def test_bytes_at_a_position_leave_the_position_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: tuple[str, ...]
) -> None:
    for name in hidden:
        monkeypatch.delattr(os, name)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(b"0123456789")
        descriptor = file.fileno()
        assert system.pwrite(descriptor, b"ab", 3) == 2
        assert system.pread(descriptor, 4, 2) == b"2ab5"
        buffer = bytearray(8)
        assert system.pread_into(descriptor, memoryview(buffer), 7) == 3
        assert buffer == b"789" + bytes(5)
        assert system.pread_into(descriptor, memoryview(buffer), 10) == 0
        assert file.tell() == 10


def test_a_lock_excludes_other_descriptors_until_it_is_closed(tmp_path: Path) -> None:
    first, second = (system.open_folder_to_lock(tmp_path) for _ in range(2))
    system.lock(first)
    with pytest.raises(BlockingIOError):
        system.lock(second, wait=False)
    os.close(first)
    system.lock(second, wait=False)
    os.close(second)


def test_cores_are_counted_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})  # pyright: ignore[reportUnknownLambdaType]
    assert system.num_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "process_cpu_count", lambda: 7, raising=False)
    assert system.num_cores() == 7
    monkeypatch.setattr(os, "process_cpu_count", lambda: None)
    assert system.num_cores() == 1


def test_a_function_that_the_c_library_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.find_c_function("no_such_function") is None

    def refuse(name: str | None) -> ctypes.CDLL:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert system.find_c_function("mallopt") is None
    assert not system.kill_with_parent()


def test_a_file_in_use_is_deleted_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, deleted = tmp_path / "kept", tmp_path / "deleted"
    kept.touch()
    deleted.touch()
    assert system.delete(deleted)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        system.delete(kept)
    monkeypatch.setattr(system, "_O_DIRECTORY", 0)
    assert not system.delete(kept)
