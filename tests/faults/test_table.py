"""The fault table: marks name existing rows, tests are counted, and no row is skipped in silence."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from faults import run, table


def test_the_rows_are_numbered() -> None:
    rows = [f"F{number}" for number in range(1, 54)] + [f"S{number}" for number in range(1, 13)]
    assert [row.number for row in table.ROWS] == rows


def test_the_page_shows_every_row_and_its_date() -> None:
    text = run.PAGE.read_text("utf-8")
    for row in table.ROWS:
        assert f"| {row.number} | {row.fault} | {row.outcome} | " in text
    day = text.partition("Run on ")[2][:10]
    assert datetime.date.fromisoformat(day).year >= 2026


def report(name: str, when: str, outcome: str, numbers: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=name,
        location=("", 0, ""),
        keywords={},
        outcome=outcome,  # pyright: ignore[reportArgumentType]
        longrepr=None,
        when=when,  # pyright: ignore[reportArgumentType]
        duration=0.5,
        user_properties=[(table.PROPERTY, numbers)],
    )


def test_what_fails_anywhere_fails_its_rows() -> None:
    tally = table.Tally()
    phases = {
        "good": ("passed", "passed", "passed"),
        "bad": ("passed", "failed", "passed"),
        "bad end": ("passed", "passed", "failed"),
        "bad start": ("failed", "passed"),
        "absent": ("skipped", "passed"),
    }
    rows = {"good": "F1 F2 F5", "bad": "F2", "bad end": "F3", "bad start": "F4", "absent": "F5 F7"}
    for name, outcomes in phases.items():
        names = ("setup", "call", "teardown") if len(outcomes) == 3 else ("setup", "teardown")
        for when, outcome in zip(names, outcomes, strict=True):
            tally.pytest_runtest_logreport(report(name, when, outcome, rows[name]))
    status = {number: proof.status for number, proof in tally.proofs.items()}
    assert status["F1"] == "pass"
    assert [status[number] for number in ("F2", "F3", "F4")] == ["FAIL"] * 3
    assert (status["F5"], status["F7"]) == ("pass (1 skipped)", "FAIL (1 skipped)")
    assert status["F8"] == "NO TEST"
    assert tally.proofs["F1"].seconds == 1.5
    assert tally.proofs["F2"].num_tests == 2
    assert not tally.is_complete


def test_a_row_that_cannot_have_a_test_yet_is_excused_until_it_has_one() -> None:
    proof = table.Proof(dataclasses.replace(table.ROWS[0], not_built="nobody was there"))
    assert proof.is_excused
    assert proof.status == "not built yet: nobody was there"
    proof.failed = 1
    assert (proof.is_excused, proof.status) == (False, "FAIL")


def test_a_table_is_complete_when_every_row_is_proven_or_excused() -> None:
    tally = table.Tally()
    for row in table.ROWS:
        if not row.not_built:
            tally.pytest_runtest_logreport(report("x", "teardown", "passed", row.number))
    assert tally.is_complete
    tally.pytest_runtest_logreport(report("y", "teardown", "failed", "F35"))
    assert not tally.is_complete


def test_the_table_in_the_page_is_replaced() -> None:
    proofs = [table.Proof(table.ROWS[0], passed=2, seconds=1.25)]
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    new = table.page(page, proofs, datetime.date(2026, 11, 21))
    assert "old" not in new
    assert "Run on 2026-11-21." in new
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "| pass | 2 | 1.2 |" in new
    assert table.page(new, proofs, datetime.date(2026, 11, 21)) == new
    with pytest.raises(ValueError, match="no place"):
        table.page("nothing", proofs, datetime.date(2026, 11, 21))


def test_an_unknown_row_stops_the_collection(request: pytest.FixtureRequest) -> None:
    mark = pytest.mark.fault
    request.node.add_marker(mark("F99"))
    with pytest.raises(pytest.UsageError, match="no such row of the fault table: F99"):
        table.note_rows([request.node])
