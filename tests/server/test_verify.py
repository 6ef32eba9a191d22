"""`verify` is quiet about a healthy database, and finds each invariant broken that somebody breaks in it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.engine import make_url

from fedplat.wire.v1 import admin_pb2, model_pb2
from fedplat_server.store.engine import async_url, create_engine
from fedplat_server.verify import files, histories, invariants, records
from fedplat_server.verify.checker import verify
from server import databases, harness
from server.harness import Site, initial_model, job_file, update_of
from server.test_process import here

DONE = job_file(
    "done", rounds=2, goal=2, over_selection=1.5, min_fraction=0.5, more='[aggregation]\nrule = "fedavgm"\n'
)


@dataclasses.dataclass(frozen=True)
class Place:
    """A database, its blobs, and the jobs in it."""

    database: str
    folder: Path
    jobs: dict[str, str]

    def execute(self, statement: str) -> None:
        databases.in_thread(self._execute(statement.format(**self.jobs)))

    async def _execute(self, statement: str) -> None:
        engine = create_engine(async_url(self.database), foreign_keys=False)
        try:
            async with engine.begin() as connection:
                result = await connection.execute(sqlalchemy.text(statement.replace(":", r"\:")))
                assert result.rowcount != 0, f"nothing was broken by {statement}"
        finally:
            await engine.dispose()

    def blob(self, digest_of: str, job: str, version: int) -> Path:
        """The file of a version: of its `digest`, or of its `state_digest`."""
        found: list[str] = []

        async def ask() -> None:
            engine = create_engine(async_url(self.database))
            query = f"SELECT {digest_of} FROM model_versions WHERE job_id = '{self.jobs[job]}' AND version = {version}"
            try:
                async with engine.connect() as connection:
                    found.append((await connection.execute(sqlalchemy.text(query))).scalar_one())
            finally:
                await engine.dispose()

        databases.in_thread(ask())
        return self.folder / "blobs" / found[0][:2] / found[0][2:4] / found[0]

    def copy(self, database: str, folder: Path) -> Place:
        shutil.copytree(self.folder, folder)
        return Place(database, folder, self.jobs)


async def _live(site: Site) -> dict[str, str]:
    """A job with a failure, an abandoned attempt and two versions; one in the middle of an attempt; a draft."""
    clients = await site.fleet(3)
    done = await site.operator.start(DONE)
    tokens = [one.token for one in await site.assign(clients)]
    await clients[2].fail(tokens[2], model_pb2.REASON_TRAINER_ERROR, "out of memory\nreally")
    for number in (0, 1):
        await clients[number].deliver(tokens[number], update_of(initial_model(), number), number + 0.1)
    tokens = [one.token for one in await site.assign(clients)]
    await clients[0].deliver(tokens[0], update_of(initial_model(), 0))
    await site.operator.stub.PauseJob(admin_pb2.JobRequest(job=done))
    await site.operator.stub.ResumeJob(admin_pb2.JobRequest(job=done))
    tokens = [one.token for one in await site.assign(clients)]
    for number in (0, 1):
        await clients[number].deliver(tokens[number], update_of(initial_model(), number), 0.1)
    await site.operator.until(done, "job", "COMPLETED")
    under_way = await site.operator.start(job_file("open", goal=2))
    tokens = [one.token for one in await site.assign(clients[:2])]
    await clients[0].deliver(tokens[0], update_of(initial_model(), 0))
    draft = await site.operator.create(job_file("draft"))
    return {"done": done, "open": under_way, "draft": draft.job_id}


async def _healthy(database: str, folder: Path) -> Place:
    async with harness.running(folder, database=database) as site:
        return Place(database, folder, await _live(site))


@pytest.fixture(scope="module")
async def healthy_sqlite(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Place:
    folder = tmp_path_factory.mktemp("healthy")
    path = shutil.copy(empty_database, folder / "fedplat.sqlite")
    return await _healthy(f"sqlite:///{path}", folder)


@pytest.fixture(scope="module")
async def healthy_postgres(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, postgres_template: str
) -> AsyncGenerator[Place]:
    with databases.postgres_database(postgres_server, postgres_template) as url:
        yield await _healthy(url, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Place]:
    """A copy of a healthy database and its blobs, of each kind."""
    if request.param == "sqlite":
        healthy: Place = request.getfixturevalue("healthy_sqlite")
        yield healthy.copy(f"sqlite:///{tmp_path / 'copy' / 'fedplat.sqlite'}", tmp_path / "copy")
        return
    healthy = request.getfixturevalue("healthy_postgres")
    server: str = request.getfixturevalue("postgres_server")
    with databases.postgres_database(server, make_url(healthy.database).database or "") as url:
        yield healthy.copy(url, tmp_path / "copy")


def job(name: str, values: str) -> str:
    return f"UPDATE jobs SET {values} WHERE job_id = '{{{name}}}'"


def attempt(name: str, round_: int, number: int, values: str) -> str:
    return f"UPDATE attempts SET {values} WHERE job_id = '{{{name}}}' AND round = {round_} AND number = {number}"


def assignment(name: str, round_: int, number: int, where: str, values: str) -> str:
    """One of the assignments of an attempt."""
    of = f"job_id = '{{{name}}}' AND round = {round_} AND number = {number}"
    one = f"(SELECT min(client_id) FROM assignments WHERE {of} AND {where})"
    return f"UPDATE assignments SET {values} WHERE {of} AND client_id = {one}"


def version(number: int, values: str) -> str:
    return f"UPDATE model_versions SET {values} WHERE job_id = '{{done}}' AND version = {number}"


def history(where: str, values: str | None = None) -> str:
    """Changes the first row of the history of which something holds; without values it is removed."""
    one = f"sequence = (SELECT min(sequence) FROM history WHERE job_id = '{{done}}' AND {where})"
    return f"DELETE FROM history WHERE {one}" if values is None else f"UPDATE history SET {values} WHERE {one}"


NEW_ATTEMPT = (
    "INSERT INTO attempts SELECT job_id, {round}, {number}, '{kind}', '{phase}', '', {base}, goal, minimum, target, "
    "opened_unix_s, {ended}, metrics FROM attempts WHERE job_id = '{{done}}' AND round = 1 AND number = 1"
)


def new_attempt(round_: int, number: int, kind: str, phase: str, base: int = 1, ended: str = "1.0") -> str:
    return NEW_ATTEMPT.format(round=round_, number=number, kind=kind, phase=phase, base=base, ended=ended)


BREAKAGES: Mapping[str, tuple[Callable[..., object], str]] = {
    "merged in an abandoned attempt": (
        invariants.merged_once,
        assignment("done", 2, 1, "true", "state = 'MERGED', reason = NULL"),
    ),
    "merged and not counted": (invariants.merged_once, version(1, "num_updates = 1")),
    "counted and not merged": (
        invariants.merged_once,
        assignment("done", 1, 1, "state = 'MERGED'", "state = 'DROPPED', reason = 'ATTEMPT_ABANDONED'"),
    ),
    "a version is missing": (
        invariants.versions_are_dense,
        "DELETE FROM model_versions WHERE job_id = '{done}' AND version = 1",
    ),
    "the first version is missing": (
        invariants.versions_are_dense,
        "DELETE FROM model_versions WHERE job_id = '{done}' AND version = 0",
    ),
    "a version without a committed attempt": (
        invariants.versions_have_one_attempt,
        attempt("done", 1, 1, "phase = 'ABANDONED'"),
    ),
    "a version of another attempt": (invariants.versions_have_one_attempt, version(2, "attempt = 1")),
    "a version of an evaluation": (invariants.versions_have_one_attempt, attempt("done", 1, 1, "kind = 'EVALUATE'")),
    "a committed attempt without a version": (
        invariants.versions_have_one_attempt,
        new_attempt(3, 1, "TRAIN", "COMMITTED", 2),
    ),
    "another base version": (invariants.versions_have_one_attempt, attempt("done", 2, 2, "base_version = 0")),
    "a momentum that is gone": (invariants.optimizer_state_is_kept, version(2, "state_digest = ''")),
    "a momentum of the initial model": (invariants.optimizer_state_is_kept, version(0, "state_digest = digest")),
    "a wrong latest version": (invariants.counters_agree, job("done", "latest_version = 1")),
    "a wrong round": (invariants.counters_agree, job("done", "round = 1")),
    "a gap between attempts": (invariants.attempts_are_numbered, attempt("done", 2, 2, "number = 3")),
    "a gap between rounds": (invariants.attempts_are_numbered, new_attempt(4, 1, "TRAIN", "ABANDONED", 2)),
    "another size": (files.blobs, version(1, "size_bytes = size_bytes + 1")),
    "no digest": (files.blobs, version(1, "digest = '../../etc/passwd'")),
    "a report without an end": (
        invariants.acknowledged_has_an_end,
        assignment("done", 2, 2, "state = 'MERGED'", "state = 'REPORTED'"),
    ),
    "an end without a reason": (
        invariants.ended_for_a_reason,
        assignment("done", 1, 1, "state = 'FAILED'", "reason = NULL"),
    ),
    "a merged one with a reason": (
        invariants.ended_for_a_reason,
        assignment("done", 1, 1, "state = 'MERGED'", "reason = 'STALE'"),
    ),
    "a report without its moment": (
        invariants.reports_are_complete,
        assignment("done", 1, 1, "state = 'MERGED'", "reported_revision = NULL"),
    ),
    "a report of the future": (
        invariants.reports_are_complete,
        assignment("done", 1, 1, "state = 'MERGED'", "reported_revision = 1000"),
    ),
    "a report without a digest": (
        invariants.reports_are_complete,
        assignment("open", 1, 1, "state = 'REPORTED'", "digest = ''"),
    ),
    "below the minimum": (invariants.above_the_minimum, attempt("done", 1, 1, "minimum = 3")),
    "a weight that was changed": (
        invariants.weights_add_up,
        assignment("done", 1, 1, "state = 'MERGED'", "weight = weight * 1.0000001"),
    ),
    "a total weight that was changed": (
        invariants.weights_add_up,
        version(1, "total_weight = total_weight * 1.0000001"),
    ),
    "training in an ended attempt": (
        invariants.nothing_open_in_the_ended,
        assignment("done", 1, 1, "true", "state = 'TRAINING', reason = NULL"),
    ),
    "uploading while the attempt commits": (
        invariants.nothing_open_in_the_ended,
        attempt("open", 1, 1, "phase = 'COMMITTING'"),
    ),
    "two open attempts": (invariants.one_open_attempt, attempt("done", 2, 1, "phase = 'COLLECTING'")),
    "an open attempt of a job that has ended": (
        invariants.open_attempts_belong_to_jobs_at_work,
        job("open", "status = 'CANCELLED'"),
    ),
    "an open attempt of a paused job": (
        invariants.open_attempts_belong_to_jobs_at_work,
        job("open", "status = 'PAUSED'"),
    ),
    "an ended attempt without an end": (invariants.end_is_noted, attempt("done", 1, 1, "ended_unix_s = NULL")),
    "an open attempt with an end": (invariants.end_is_noted, attempt("open", 1, 1, "ended_unix_s = 1.0")),
    "a job file of another world": (invariants.job_file_is_readable, job("draft", "job_file = 'name = 3'")),
    "a state that nobody noted": (histories.of_job, job("draft", "status = 'RUNNING'")),
    "a state that nobody knows": (
        histories.of_assignments,
        assignment("done", 1, 1, "true", "state = 'NONSENSE', reason = 'STALE'"),
    ),
    "a phase that nobody noted": (
        histories.of_attempt,
        attempt("done", 2, 1, "phase = 'COMMITTED', kind = 'EVALUATE'"),
    ),
    "a step of a job that is not allowed": (
        histories.of_job,
        history("to_state = 'RUNNING'", "to_state = 'COMPLETED'"),
    ),
    "a step of an attempt that is gone": (histories.of_attempt, history("to_state = 'COLLECTING'")),
    "a step of an assignment that is gone": (
        histories.of_assignments,
        history("entity = 'assignment' AND to_state = 'TRAINING'"),
    ),
    "an assignment that is gone": (
        histories.of_assignments,
        "DELETE FROM assignments WHERE job_id = '{done}' AND round = 1",
    ),
    "an attempt that is gone": (
        histories.of_nothing,
        "DELETE FROM attempts WHERE job_id = '{done}' AND number = 1 AND phase = 'ABANDONED'",
    ),
    "a version that nobody noted": (histories.of_versions, history("entity = 'version'")),
    "a version noted out of order": (histories.of_versions, history("entity = 'version'", "from_state = '5'")),
    "an entity that nobody knows": (
        histories.of_nothing,
        history("entity = 'attempt'", "entity = 'ghost', attempt = 9"),
    ),
}


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


async def test_a_healthy_database_is_clean(place: Place) -> None:
    report = await verify(place.database, place.folder)
    assert (report.findings, report.notes) == ([], [])
    counted = {"jobs": 3, "attempts": 4, "assignments": 11, "versions": 5}
    assert {name: report.checked[name] for name in counted} == counted
    # Three jobs with one initial model, two versions, two momenta.
    assert report.checked["blobs"] == 5
    assert report.checked["bytes"] > 5 * len(initial_model().buffer)


def test_every_check_is_tried() -> None:
    tried = {check for check, _ in BREAKAGES.values()}
    assert tried == {check.find for check in invariants.CHECKS} | {files.blobs}


@pytest.mark.parametrize("name", BREAKAGES)
async def test_what_is_broken_in_the_database_is_found(place: Place, name: str) -> None:
    check, statement = BREAKAGES[name]
    if place.database.startswith("postgresql"):  # which would not let some of it happen
        place.execute("ALTER TABLE assignments DROP CONSTRAINT fk_assignments_attempts")
    place.execute(statement)
    report = await verify(place.database, place.folder)
    assert check.__name__ in {finding.check for finding in report.findings}, report.findings
    for finding in report.findings:
        assert finding.place.job in place.jobs.values()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["digest", "state_digest"])
async def test_what_is_broken_in_the_blobs_is_found(
    place: Place, which: str, damage: tuple[Callable[[Path], None], str]
) -> None:
    path, (do, said) = place.blob(which, "done", 1), damage
    do(path)
    report = await verify(place.database, place.folder)
    if which == "state_digest" and said == "bytes in":
        said = "has the digest"  # nothing says how large it should be
    (finding,) = report.findings
    assert (finding.invariant, finding.place) == ("I2", records.Place(place.jobs["done"], version=1))
    assert said in finding.found
    assert finding.found.startswith("its model" if which == "digest" else "its optimizer's state")


@pytest.mark.parametrize("damage", [Path.unlink, _replaced, _shortened])
async def test_what_is_broken_in_the_spool_is_found(place: Place, damage: Callable[[Path], None]) -> None:
    (path,) = (path for path in (place.folder / "uploads").rglob("*") if path.is_file())
    damage(path)
    report = await verify(place.database, place.folder)
    (finding,) = report.findings
    assert (finding.invariant, finding.check, finding.place.job) == ("I3", "spooled", place.jobs["open"])
    assert finding.place.client


async def test_files_that_nobody_needs_are_notes(place: Place) -> None:
    blobs = place.folder / "blobs"
    (blobs / "left.tmp").write_bytes(b"torn")
    (blobs / "00" / "00").mkdir(parents=True)
    (blobs / "00" / "00" / ("0" * 64)).write_bytes(b"orphan")
    report = await verify(place.database, place.folder)
    assert report.findings == []
    assert report.notes == [
        "1 blobs belong to no version; the next start of the daemon removes them",
        f"the file left.tmp in {blobs} is no blob",
    ]


async def test_beside_a_running_daemon(place: Place) -> None:
    """Every look in the middle of rounds sees a consistent database."""
    async with harness.running(place.folder, database=place.database) as site:
        job = await site.operator.start(job_file("busy", rounds=5, goal=1))
        client = await site.enrol()
        for number in range(5):
            assignment = await client.assignment()
            assert (await verify(place.database, place.folder)).findings == []
            await client.deliver(assignment.token, update_of(initial_model(), number))
            assert (await verify(place.database, place.folder)).findings == []
        await site.operator.until(job, "job", "COMPLETED")


def test_the_command(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("verify", "--data-dir", str(place.folder), "--database", place.database)
    status, out, err = here(monkeypatch, capsys, *arguments)
    assert (status, err) == (0, "")
    assert out.startswith("checked 3 jobs, 4 attempts, 11 assignments, 5 versions, ")
    assert out.endswith("MiB): nothing is broken\n")
    assert json.loads(here(monkeypatch, capsys, *arguments, "--json")[1])["clean"] is True

    place.blob("digest", "done", 2).unlink()
    status, out, err = here(monkeypatch, capsys, *arguments)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"broken I2: job {place.jobs['done']} version 2: its model is not there; expected the")
    assert lines[1].endswith("MiB): 1 findings")
    status, out, err = here(monkeypatch, capsys, *arguments, "--json")
    assert (status, err) == (1, "")
    (finding,) = json.loads(out)["findings"]
    assert finding["place"] == {
        "job": place.jobs["done"],
        "version": 2,
        "round": None,
        "attempt": None,
        "client": None,
    }
    assert finding["advice"]


def test_the_command_where_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = here(monkeypatch, capsys, "verify", "--data-dir", str(tmp_path / "nowhere"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "there is no data folder" in err
    assert not (tmp_path / "nowhere").exists()
    status, out, err = here(monkeypatch, capsys, "verify", "--data-dir", str(tmp_path))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "run fedplat-server db upgrade" in err
    assert here(monkeypatch, capsys, "verify", "--no-such-option")[0] == 2
