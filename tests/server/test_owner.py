"""A data folder belongs to one database: no other one removes what is there, and unknown files stay for days."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedplat.aggregate import state_to_bytes
from fedplat.privacy.noise import Tree
from fedplat.rounds import AttemptKey
from fedplat_server.cli.options import parse_spool
from fedplat_server.database import schema
from fedplat_server.database.engine import describe
from fedplat_server.errors import BlobError, ConfigError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import files, ownership
from fedplat_server.storage.blob_folder import StoredDigests
from fedplat_server.storage.blob_stores import BlobPlace, reconcile
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.ownership import Contents, Owner
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_file import RelayStore, name_attempt
from fedplat_server.training.server_training import ServerTraining
from support import daemons
from support.commands import here
from support.jobs import job_file
from support.rollbacks import ZERO, play

OLD_S = files.SET_ASIDE_KEEP_S + 60.0


async def trained(folder: Path, database: Path) -> list[Path]:
    """Train a job on a database; return the files of its models."""
    await asyncio.to_thread(schema.upgrade, str(database))
    async with daemons.running(folder, database=str(database)) as site:
        job, clients = await site.operator.start(job_file(rounds=2), ZERO), await site.fleet(2)
        for version in (1, 2):
            await play(site, clients, job, version, 1.0, 0.0)
        await site.operator.until(job, "job", "COMPLETED")
    return models_in(folder)


def models_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "blobs").rglob("*") if path.is_file())


# --- which database --------------------------------------------------------------------------------------------


def test_a_forgotten_database_costs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hints of the program led from a folder whose database was elsewhere to one without models."""
    folder = tmp_path / "data"
    models = asyncio.run(trained(folder, tmp_path / "elsewhere.sqlite"))
    assert len(models) == 3
    by_hand = ["db", "upgrade", "--database", str(folder / "fedplat.sqlite")]
    for command in (["run", "--insecure"], ["db", "upgrade"], by_hand, ["init"], ["prune", "--yes"], ["verify"]):
        status, _, err = here(monkeypatch, capsys, *command, "--data-dir", str(folder))
        assert (status, err.count("\n")) == (2, 1), err
        assert "--database" in err
        assert "elsewhere.sqlite" in err
    assert models_in(folder) == models
    assert not (folder / "fedplat.sqlite").exists()
    shutil.copy(tmp_path / "elsewhere.sqlite", folder / "fedplat.sqlite")  # the right one, at another path
    assert here(monkeypatch, capsys, "verify", "--data-dir", str(folder))[0] == 0


@pytest.mark.parametrize("command", [["db", "upgrade"], ["init"], ["verify"], ["prune", "--yes"]], ids=" ".join)
@pytest.mark.parametrize("is_new", [True, False])
def test_no_command_takes_another_database_for_that_of_a_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    is_new: bool,
) -> None:
    folder, other = tmp_path / "data", tmp_path / "other.sqlite"
    schema.upgrade(str(tmp_path / "one.sqlite"))
    assert (
        here(monkeypatch, capsys, "init", "--data-dir", str(folder), "--database", str(tmp_path / "one.sqlite"))[0] == 0
    )
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if not is_new:
        schema.upgrade(str(other))
    status, out, err = here(monkeypatch, capsys, *command, "--data-dir", str(folder), "--database", str(other))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert "one.sqlite" in err
    assert other.exists() is not is_new
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"} == before


@pytest.mark.parametrize("has_owner", [True, False])
async def test_a_daemon_on_another_database_removes_nothing(tmp_path: Path, has_owner: bool) -> None:
    folder = tmp_path / "data"
    models = await trained(folder, tmp_path / "one.sqlite")
    if not has_owner:  # as an older release leaves it
        (folder / ownership.NAME).unlink()
    await trained(tmp_path / "other", tmp_path / "other.sqlite")
    with sqlite3.connect(tmp_path / "other.sqlite") as rows:  # it shares the initial model with the first one
        rows.execute("DELETE FROM model_versions WHERE version > 0")
    with pytest.raises(ConfigError, match=r"nothing was removed: name .*--database"):
        async with daemons.running(folder, database=str(tmp_path / "other.sqlite")):
            pass
    assert models_in(folder) == models
    async with daemons.running(folder, database=str(tmp_path / "one.sqlite")):
        assert models_in(folder) == models
    assert json.loads((folder / ownership.NAME).read_text())["url"].endswith("one.sqlite")


@pytest.mark.parametrize(
    ("contents", "is_mine"),
    [(Contents(0, 0), True), (Contents(5, 0), True), (Contents(5, 5), True), (Contents(5, 6), False)],
)
def test_a_folder_without_an_owner_is_adopted_by_the_database_that_knows_it(
    tmp_path: Path, contents: Contents, is_mine: bool
) -> None:
    def claim() -> None:
        ownership.claim_folder(tmp_path, Owner("one"), "models", lambda: contents)

    if is_mine:
        claim()
        assert ownership.find_owner(tmp_path) == Owner("one")
    else:
        with pytest.raises(ConfigError, match=r"6 models or updates that the database \(with the id 'one'\)"):
            claim()
        assert ownership.find_owner(tmp_path) is None


def test_a_description_of_a_database_has_no_password() -> None:
    pytest.importorskip("asyncpg")
    assert describe("postgresql://anna:secret@db:5433/fed?sslmode=require") == "postgresql://anna@db:5433/fed"


def test_the_text_of_the_refusal_makes_the_folder_this_database_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ownership.claim_folder(tmp_path, Owner("one"), "models", lambda: Contents(0, 1))
    text = str(caught.value).partition("write ")[2].partition(" into")[0]
    (tmp_path / ownership.NAME).write_text(text)
    ownership.claim_folder(tmp_path, Owner("one"), "models", lambda: Contents(0, 1))


def test_an_owner_that_cannot_be_read_is_no_owner_to_replace(tmp_path: Path) -> None:
    (tmp_path / ownership.NAME).write_text("{")
    with pytest.raises(BlobError, match="damaged"):
        ownership.claim_folder(tmp_path, Owner("one"), "models")


def test_init_repeats_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = tmp_path / "my data", tmp_path / "url"
    url.write_text(f"{tmp_path / 'elsewhere.sqlite'}\n")
    given = ["--data-dir", str(folder), "--database", f"@{url}"]
    _, out, _ = here(monkeypatch, capsys, "init", *given)
    assert f"fedplat-server run --data-dir '{folder}' --database @{url} --listen" in out
    (tmp_path / "elsewhere.sqlite").rename(tmp_path / "moved.sqlite")
    status, _, err = here(monkeypatch, capsys, "operator", "list", *given)
    assert status == 1
    assert f"run fedplat-server db upgrade --data-dir '{folder}' --database @{url}" in err
    assert "check --database" in err


# --- what no database knows ------------------------------------------------------------------------------------


def age(folder: Path) -> None:
    """Let the time of what was set aside pass."""
    for path in (folder / files.SET_ASIDE_FOLDER).iterdir():
        os.utime(path, (0.0, time.time() - OLD_S))


def test_unknown_models_stay_for_days_and_come_back_with_their_database(tmp_path: Path) -> None:
    place = BlobPlace(tmp_path)
    blobs = place.open()
    needed, removed, newer = (blobs.put_chunks([text]).digest for text in (b"needed", b"removed", b"newer"))
    restored = StoredDigests(frozenset({needed}), frozenset({removed}))  # the database is an older backup
    assert reconcile(blobs, place, restored).orphans == (1, 1)
    assert blobs.all_digests() == {needed}
    after = reconcile(blobs, place, StoredDigests(frozenset({needed, newer})))  # the newer one was put back
    assert (after.copied, after.missing) == (1, frozenset())
    assert blobs.path(newer).read_bytes() == b"newer"
    assert reconcile(blobs, place, restored).orphans == (0, 1)
    age(blobs.folder)
    blobs.expire()
    assert models_in(tmp_path) == [blobs.path(needed)]


def test_the_running_daemon_sets_unknown_models_aside_too(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = blobs.put_chunks([b"unknown"]).digest
    with blobs.sweep() as sweep:
        assert sweep.set_aside([digest]) == 0  # about to be referenced
    blobs.settle([digest])
    with blobs.sweep() as sweep:
        assert sweep.set_aside([digest]) == 7
    assert (blobs.all_digests(), blobs.take_back(digest)) == (frozenset(), True)
    assert blobs.all_digests() == {digest}


def test_a_state_with_seeds_of_noise_is_erased_and_not_set_aside(tmp_path: Path) -> None:
    """It is what a crash leaves between the state of a version and the version."""
    blobs = BlobStore(tmp_path)
    scalars = Tree(4).first()
    state = state_to_bytes({"velocity": np.ones(3, np.float32)}, {**scalars, list(scalars)[1]: 7.0})
    secret, harmless = (blobs.put_chunks([data]).digest for data in (state, b"a model"))
    with blobs.sweep() as sweep:
        blobs.settle([secret])
        sweep.set_aside([secret])
    again = blobs.put_chunks([state]).digest
    blobs.remove_orphans(StoredDigests())
    assert (again, blobs.take_back(secret), blobs.take_back(harmless)) == (secret, False, True)


UNKNOWN, KNOWN = AttemptKey("another database's", 1, 1), AttemptKey("ended", 1, 1)


@pytest.mark.parametrize("kind", ["uploads", "relay"])
def test_updates_of_unknown_attempts_stay_for_days(tmp_path: Path, kind: str) -> None:
    store = Spool(tmp_path) if kind == "uploads" else RelayStore(tmp_path)
    for attempt in (UNKNOWN, KNOWN):
        folder = tmp_path / name_attempt(attempt)
        folder.mkdir()
        (folder / "update").write_bytes(b"weeks of training")
    (tmp_path / "notes.txt").write_text("not of fedplat")
    for _ in range(2):
        store.keep([], {name_attempt(KNOWN)})
        assert [path.read_bytes() for path in tmp_path.rglob("update")] == [b"weeks of training"]
        assert (tmp_path / files.SET_ASIDE_FOLDER / name_attempt(UNKNOWN)).is_dir()
    age(tmp_path)
    store.expire()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


def test_checkpoints_of_unknown_jobs_stay_for_days(tmp_path: Path) -> None:
    def names() -> Sequence[str]:
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir())

    folder = tmp_path / "warm_start"
    for job in ("j-open", "j-ended", "j-unknown"):
        (folder / job).mkdir(parents=True)
    training = ServerTraining({}, tmp_path, BlobPlace(tmp_path).open(Instruments()), lambda event: None, ())
    training.keep({"j-open"}, {"j-open", "j-ended"})
    assert names() == ["j-open", files.SET_ASIDE_FOLDER, f"{files.SET_ASIDE_FOLDER}/j-unknown"]
    age(folder)
    training.expire()
    assert names() == ["j-open", files.SET_ASIDE_FOLDER]


# --- paths that look like URLs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["main%2Ffix", "a?b", "a?c", "x#y", "postgresql"])
def test_everything_of_a_server_is_in_its_folder_whatever_its_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = here(monkeypatch, capsys, "init", "--data-dir", str(tmp_path / name))
    assert (status, err) == (0, "")
    assert (tmp_path / name / "fedplat.sqlite").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_that_is_no_text_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/M\xfcnchen")
    status, _, err = here(monkeypatch, capsys, "init", "--data-dir", name)
    assert (status, err.count("\n")) == (2, 1)
    assert "UTF-8" in err


@pytest.mark.skipif(sys.platform != "linux", reason="relative paths of SQLite files")
def test_a_relative_path_like_postgres_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = here(monkeypatch, capsys, "db", "upgrade", "--database", "postgres%20.sqlite")
    assert (status, out.startswith("the database is at revision")) == (0, True)
    assert (tmp_path / "postgres%20.sqlite").is_file()


def test_a_folder_with_a_colon_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_spool("2024:spool") == str(tmp_path / "2024:spool")
    with pytest.raises(ConfigError, match="expected a URL such as s3://"):
        parse_spool("s3:/bucket")
