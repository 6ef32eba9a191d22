"""The model of a task as a file on each host of a client's ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from fedplat_client.trainers import model_file
from support.ranks.group import RankGroup, Zygote

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
PRIVATE = ["0o700", "0o600"]


@pytest.fixture(scope="module")
def three() -> Generator[RankGroup]:
    zygote = Zygote()
    with zygote.group(3) as group:
        yield group
    zygote.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "seen", "modes"),
    [
        ([0, 0, 0], [10.0, 10.0, 10.0], [PRIVATE, [], []]),
        ([0, 1, 1], [10.0, 5.0, 5.0], [PRIVATE, PRIVATE, []]),
    ],
    ids=["one host", "two hosts"],
)
def test_ranks_map_one_private_file_on_each_host_that_is_removed(
    three: RankGroup, tmp_path: Path, hosts: list[int], seen: list[float], modes: list[list[str]]
) -> None:
    """A rank of rank 0's host sees what rank 0 writes: the file is mapped, not copied."""
    replies = three.call("support.model_files:share", folder=str(tmp_path), hosts=hosts)
    assert [reply["same"] for reply in replies] == [True] * 3
    assert [reply["left"] for reply in replies] == [[]] * 3
    assert [reply["seen"] for reply in replies] == seen
    assert [reply["modes"] for reply in replies] == modes
    assert replies[0]["update"]
    assert not list(tmp_path.rglob("fedplat-model-*"))


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
def test_all_ranks_raise_if_one_has_no_space(three: RankGroup, tmp_path: Path, full: int) -> None:
    """All ranks meet often while files are written: a very large one takes longer than a collective."""
    replies = three.call("support.model_files:fill_disk", folder=str(tmp_path), full=full)
    assert replies[0] == replies[1] == replies[2]
    error, left, num_meetings, same = replies[0]
    assert error.startswith(f"the model's file cannot be used on rank {full}: OSError: [Errno 27] File too large")
    assert (left, same) == ("[]", "True")
    assert int(num_meetings) >= 2 + 4  # one for each chunk of 4 MiB, the hosts, the folders, the end


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_later(place: Path) -> None:
    stale = place / "fedplat-model-stale"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half of it")
    own, lock = model_file.make_folder()
    command = [sys.executable, "-c", HOLD, str(stale)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        model_file.remove_stale()
        assert sorted(place.iterdir()) == sorted([own, stale])
        process.kill()
        process.wait()
    model_file.remove_stale()
    assert list(place.iterdir()) == [own]
    os.close(lock)
    model_file.remove_stale()
    assert not list(place.iterdir())


def test_only_own_folders_are_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (place / "fedplat-model-link").symlink_to(elsewhere)
    (place / "fedplat-model-file").touch()
    (place / "fedplat-model-foreign").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(place).st_uid + 1)
    model_file.remove_stale()
    assert len(list(place.iterdir())) == 4
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    model_file.remove_stale()
    assert sorted(path.name for path in place.iterdir()) == ["elsewhere", "fedplat-model-file", "fedplat-model-link"]
