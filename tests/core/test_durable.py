"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedplat import durable


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of what was synced, in order."""
    kinds: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        kinds.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return kinds


def test_a_file_is_synced_before_its_folder(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "a"
    for content in (b"first", b"second"):
        durable.write_bytes(path, content)
        assert path.read_bytes() == content
    assert synced == ["file", "folder"] * 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("mode", "umask", "expected"), [(0o600, 0o022, 0o600), (0o644, 0o022, 0o644), (0o666, 0o077, 0o600)]
)
def test_the_mode_is_that_of_the_caller_and_the_umask(tmp_path: Path, mode: int, umask: int, expected: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"open to all")
    path.chmod(0o666)
    before = os.umask(umask)
    try:
        durable.write_bytes(path, b"x", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    durable.write_bytes(path, b"old")

    def half() -> Iterator[bytes]:
        yield b"half of the n"
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"), durable.atomic_write(path) as file:
        file.writelines(half())

    def fail(descriptor: int) -> None:
        raise OSError("the disk is broken")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        durable.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_not_replaced_unless_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "a"
    durable.write_bytes(path, b"first", overwrite=False)
    with pytest.raises(FileExistsError):
        durable.write_bytes(path, b"second", overwrite=False)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_synced_with_its_files_before_it_gets_its_name(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for name in "ab":
        (part / name).write_text(name)
    rename = Path.rename

    def note_rename(source: Path, target: Path) -> Path:
        synced.append("renamed")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", note_rename)
    durable.rename_folder(part, tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["a", "b"]
    assert synced == ["file", "file", "folder", "renamed", "folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_new_folder_is_synced_into_each_folder_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that exists: the process that made it may have been killed before its sync."""
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync", synced.append)
    folder = tmp_path / "a" / "b" / "c"
    durable.make_folder(folder)
    assert folder.is_dir()
    assert {*synced} == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    durable.make_folder(folder)
    assert synced == [tmp_path / "a" / "b"]
