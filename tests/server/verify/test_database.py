"""`verify` finds nothing in a healthy database, and finds each invariant that a test breaks."""

from __future__ import annotations

import time

import pytest

from fedplat_server.verify import checks, files, inspection
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import initial_model, update_of
from support.jobs import job_file
from support.verify.breakages import BREAKAGES, assignment
from support.verify.places import MakePlace, Place

NUM_DATABASES = 8


async def test_a_healthy_database_is_clean(place: Place) -> None:
    report = await verify(place.database, place.folder)
    assert (report.findings, report.notes) == ([], [])
    counted = {"jobs": 4, "attempts": 5, "assignments": 13, "versions": 7}
    assert {name: report.checked[name] for name in counted} == counted
    # Four jobs with one initial model, two versions, two momenta, two deltas, a release.
    assert report.checked["blobs"] == 8
    assert report.checked["bytes"] > 5 * len(initial_model().buffer)


def test_every_check_is_tried() -> None:
    tried = {check for check, _ in BREAKAGES.values()}
    assert tried == {check.find for check in checks.CHECKS} | {files.blobs}


def loosen(place: Place) -> None:
    """Remove the constraint of PostgreSQL that would refuse some of the changes."""
    if place.database.startswith("postgresql"):
        place.execute("ALTER TABLE assignments DROP CONSTRAINT fk_assignments_attempts")


@pytest.mark.slow
@pytest.mark.parametrize("places", ["sqlite", pytest.param("postgres", marks=pytest.mark.grid)], indirect=True)
@pytest.mark.parametrize("name", BREAKAGES)
async def test_what_is_broken_in_the_database_is_found(place: Place, name: str) -> None:
    check, statement = BREAKAGES[name]
    loosen(place)
    place.execute(statement)
    report = await verify(place.database, place.folder, live=True)
    assert check.__name__ in {finding.check for finding in report.findings}, report.findings
    for finding in report.findings:
        assert finding.place.job in (place.jobs.values() if finding.invariant != "audit" else [None])


async def test_what_is_broken_in_many_ways_is_found(places: MakePlace) -> None:
    """All ways in few databases, each with one way for each check.

    A way whose rows another one has changed or hidden waits for the next database.
    """
    waiting = dict(BREAKAGES)
    for _ in range(NUM_DATABASES):
        with places() as place:
            loosen(place)
            broken: dict[str, str] = {}
            for name, (check, statement) in waiting.items():
                if check.__name__ not in broken and place.try_to_break(statement):
                    broken[check.__name__] = name
            report = await verify(place.database, place.folder, live=True)
        for check in broken.keys() & {finding.check for finding in report.findings}:
            del waiting[broken[check]]
    assert waiting == {}


async def test_what_is_overdue_is_broken_beside_a_daemon_only(place: Place) -> None:
    """Without a daemon it waits for the next start; a small clock difference, or a busy daemon, is not a finding."""
    place.execute(assignment("open", 1, 1, "state = 'TRAINING'", f"deadline_unix_s = {time.time() - 30.0}"))
    assert (await verify(place.database, place.folder, live=True)).findings == []
    place.execute(assignment("open", 1, 1, "state = 'TRAINING'", f"deadline_unix_s = {time.time() - 3600.0}"))
    report = await verify(place.database, place.folder)
    assert report.findings == []
    assert report.notes == ["1 assignments are open after their deadline; a running daemon ends them"]
    (finding,) = (await verify(place.database, place.folder, live=True)).findings
    assert (finding.invariant, finding.check, finding.place.round) == ("I7", "overdue", 1)


async def test_a_long_audit_log_is_read_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "AUDIT_ROWS", 2)
    report = await verify(place.database, place.folder)
    assert report.findings == []
    assert report.checked["audit rows"] > 4
    place.execute("DELETE FROM audit_log WHERE sequence = 3")
    report = await verify(place.database, place.folder)
    assert [finding.check for finding in report.findings] == ["audit_chain", "audit_chain"]


async def test_beside_a_running_daemon(place: Place) -> None:
    """Every check in the middle of rounds sees a consistent database."""
    async with daemons.running(place.folder, database=place.database) as site:
        job = await site.operator.start(job_file("busy", rounds=5, goal=1))
        client = await site.enroll()
        for number in range(5):
            assignment = await client.assignment()
            assert (await verify(place.database, place.folder, live=True)).findings == []
            await client.deliver(assignment.token, update_of(initial_model(), number))
            assert (await verify(place.database, place.folder, live=True)).findings == []
        await site.operator.until(job, "job", "COMPLETED")
