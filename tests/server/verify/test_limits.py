"""`verify` finds clients that took part too often, in a database that was changed by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy

from fedplat_server.database.engine import async_url, create_blocking_engine
from fedplat_server.database.store import open_store
from fedplat_server.verify import inspection
from fedplat_server.verify.checks import Finding
from fedplat_server.verify.inspection import verify
from support.store.driver import Driver, Ticks
from support.store.limits import BOTH, LIMITED, SEPARATED, play

COHORTS = ("ab", "cd", "ae", "cf", "gh")
TOO_SOON = [(4, "it also took part in round 3"), (5, "it also took part in round 4")]
TOO_OFTEN = [(None, "it took part in 4 rounds")]


async def found(database: Path) -> list[Finding]:
    """The findings about clients, without those about the missing models."""
    return [one for one in (await verify(str(database), database.parent)).findings if one.invariant == "limits"]


@pytest.mark.parametrize(
    ("job_file", "expected"),
    [
        (BOTH, TOO_SOON + TOO_OFTEN),
        (LIMITED, TOO_OFTEN),
        (SEPARATED.replace("min_separation = 2", "min_separation = 1"), TOO_SOON),
    ],
)
async def test_who_takes_part_too_often_is_found(
    empty_database: Path,
    tmp_path: Path,
    job_file: str,
    expected: list[tuple[int | None, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inspection, "CLIENTS", 3)  # so that they are read in parts
    database = Path(shutil.copy(empty_database, tmp_path))
    store = await open_store(str(database), Ticks())
    driver = Driver(store, check=False)
    await driver.create("j", job_file)
    for cohort in COHORTS:
        await play(driver, "j", *cohort)
    await store.close()
    assert await found(database) == []
    engine = create_blocking_engine(async_url(str(database)))
    with engine.begin() as connection:
        for client_id in ("f", "g"):  # of rounds 4 and 5
            changed = f"UPDATE assignments SET client_id = 'a' WHERE client_id = '{client_id}'"
            assert connection.execute(sqlalchemy.text(changed)).rowcount == 1
    engine.dispose()
    findings = await found(database)
    assert [(one.place.round, one.found) for one in findings] == expected
    assert {(one.place.job, one.place.client) for one in findings} == {("j", "a")}
    assert ("privacy.max_participations" in findings[-1].expected) == (findings[-1].place.round is None)
