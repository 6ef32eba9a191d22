"""The data folder is for its owner: what commands make, what was there before, and what they start."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from fedplat_server.cli import main
from fedplat_server.database import schema
from fedplat_server.storage import data_dir as folder
from support import daemons
from support.commands import here
from support.jobs import job_file

pytestmark = pytest.mark.calm
COMMAND = str(Path(sys.executable).parent / "fedplat-server")


@pytest.fixture(autouse=True)
def _usual_umask() -> Generator[None]:
    """What most hosts have."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(*paths: Path) -> list[str]:
    """What other users could read or enter."""
    inside = [each for path in paths for each in (path, *path.rglob("*")) if not each.is_symlink()]
    found = ((each, stat.S_IMODE(each.stat().st_mode)) for each in inside)
    return [f"{each} {mode:o}" for each, mode in found if mode & 0o077]


def command(*arguments: str | Path) -> None:
    subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_all_that_commands_make_is_for_their_user_only(tmp_path: Path) -> None:
    """A process of its own for each: the umask is that of a process. The folders above are made like that, too."""
    data = tmp_path / "srv" / "fedplat"
    command("init", "--data-dir", data, "--host", "localhost")
    public = {data / "pki" / "ca.pem", data / "pki" / "server.pem"}
    assert open_to_others(tmp_path / "srv") == [
        f"{each} 644" for each in sorted(public) if stat.S_IMODE(each.stat().st_mode) & 0o077
    ]
    elsewhere = tmp_path / "made" / "fedplat.sqlite"
    elsewhere.parent.mkdir(mode=0o700)
    command("db", "upgrade", "--data-dir", tmp_path / "new", "--database", f"sqlite:///{elsewhere}")
    assert open_to_others(elsewhere.parent) == []


def test_what_is_there_already_is_closed(tmp_path: Path) -> None:
    data, database = tmp_path / "data", tmp_path / "elsewhere" / "fedplat.sqlite"
    for name in ("blobs", "uploads", "logs", "backups"):
        (data / name).mkdir(parents=True)
    for name in ("fedplat.sqlite", "fedplat.sqlite-wal", "fedplat.sqlite-shm", "logs.txt"):
        (data / name).touch()
    database.parent.mkdir()
    for ending in ("", "-wal", "-shm"):
        database.with_name(database.name + ending).touch()
    assert len(open_to_others(data)) == 9
    assert folder.protect(data, database) == []
    assert open_to_others(data) == []
    assert open_to_others(*database.parent.iterdir()) == []
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    assert stat.S_IMODE(database.parent.stat().st_mode) == 0o755, "a folder that is not fedplat's"


def test_what_cannot_be_closed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir(mode=0o700)
    other.mkdir()
    (data / "blobs").symlink_to(other)
    (warning,) = folder.protect(data)
    assert warning == (
        f"other users of this host may read {data / 'blobs'}, and it could not be closed (it is a symbolic link): "
        "run chmod go-rwx on it"
    )
    assert stat.S_IMODE(other.stat().st_mode) == 0o755
    (data / "blobs").unlink()
    data.chmod(0o755)

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    (warning,) = folder.protect(data)
    assert "(Operation not permitted)" in warning


async def test_a_daemon_closes_the_folder_of_an_older_version(folder: Path) -> None:
    """Whatever the umask of those who embed the daemon: nothing that lies in the folder can be reached."""
    folder.chmod(0o755)
    (folder / "fedplat.sqlite").chmod(0o644)
    async with daemons.running(folder) as site:
        await site.operator.start(job_file())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        stored = sorted(folder.glob("fedplat.sqlite*"))
        assert len(stored) >= 2, "the database has a -wal while it is open"
        assert open_to_others(*stored) == []


def test_every_command_begins_with_the_umask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read or made, so that whatever runs below has it; processes that are started inherit it."""
    seen: list[str] = []

    def run() -> int:
        child = "import os; print(oct(os.umask(0)))"
        seen.append(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
        return 0

    monkeypatch.setattr(main, "_run", run)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        main.main()
    signal.signal(signal.SIGTERM, before)
    assert seen == ["0o77\n"]


@pytest.mark.slow
def test_a_database_of_an_older_version_is_closed_by_its_upgrade(tmp_path: Path) -> None:
    database = tmp_path / "fedplat.sqlite"
    schema.upgrade(str(database))
    assert stat.S_IMODE(database.stat().st_mode) == 0o644
    command("db", "upgrade", "--data-dir", tmp_path / "data", "--database", str(database))
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


def test_a_password_belongs_into_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens there: the commands fail, but first they warn of what is an argument, and of nothing else."""
    url = "postgresql://ben:hush-hush@127.0.0.1:1/fedplat"
    held = tmp_path / "database"
    held.write_text(url + "\n")

    def said(*arguments: str, environment: str = "") -> str:
        with monkeypatch.context() as patch:
            if environment:
                patch.setenv("FEDPLAT_DATABASE", environment)
            status, out, err = here(patch, capsys, "db", "current", *arguments)
        assert status == 1, err
        assert "127.0.0.1:1" in err
        assert "hush-hush" not in out + err
        return err

    assert "warning: --database has a password" in said("--database", url)
    for silent in (
        said("--database", f"@{held}"),
        said(environment=url),
        said(environment=f"@{held}"),
        said("--database", url.replace(":hush-hush", "")),
    ):
        assert "warning" not in silent


@pytest.mark.parametrize("content", [None, "", "postgresql://a@b/c\npostgresql://d@e/f"])
def test_a_file_without_a_url_is_refused(
    tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "database"
    if content is not None:
        path.write_text(content)
    status, _, err = here(monkeypatch, capsys, "db", "current", "--database", f"@{path}")
    assert status == 2
    assert "expected one line, a URL" in err
    assert err.count("\n") == 1
