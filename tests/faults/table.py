"""The fault table: its rows, which tests prove each of them, and how that is shown.

A test names the rows that it proves: `@pytest.mark.fault("F12")`. `tests/conftest.py` refuses names of unknown rows
and puts them into the test's reports; `Tally` collects these, also from pytest's worker processes.
"""

from __future__ import annotations

import dataclasses
import datetime
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROPERTY = "faults"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault, what happens, and, if nothing can prove it yet, the reason."""

    number: str
    fault: str
    outcome: str
    not_built: str = ""


def read_rows() -> list[Row]:
    """All rows, in order."""
    return [Row(**row) for row in tomllib.loads((HERE / "table.toml").read_text("utf-8"))["row"]]


ROWS = read_rows()
NUMBERS = frozenset(row.number for row in ROWS)


def note_rows(items: Iterable[pytest.Item]) -> None:
    """Puts the rows that tests name into their reports. Raises `pytest.UsageError` for unknown rows."""
    for item in items:
        numbers = [str(number) for mark in item.iter_markers("fault") for number in mark.args]
        if unknown := set(numbers) - NUMBERS:
            raise pytest.UsageError(f"{item.nodeid}: no such row of the fault table: {', '.join(sorted(unknown))}")
        if numbers:
            item.user_properties.append((PROPERTY, " ".join(dict.fromkeys(numbers))))


@dataclasses.dataclass
class Proof:
    """A row, with the results of its tests."""

    row: Row
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def num_tests(self) -> int:
        """How many tests name the row."""
        return self.passed + self.failed + self.skipped

    @property
    def is_proven(self) -> bool:
        """Whether at least one test passed, and none failed."""
        return self.passed > 0 and not self.failed

    @property
    def is_excused(self) -> bool:
        """Whether the row has no test because it cannot have one yet."""
        return bool(self.row.not_built) and not self.num_tests

    @property
    def status(self) -> str:
        """The row's result, in words."""
        if self.is_excused:
            return f"not built yet: {self.row.not_built}"
        if not self.num_tests:
            return "NO TEST"
        word = "pass" if self.is_proven else "FAIL"
        return word + (f" ({self.skipped} skipped)" if self.skipped else "")


class Tally:
    """A plugin of pytest that counts the results of each row's tests."""

    def __init__(self) -> None:
        self.proofs = {row.number: Proof(row) for row in ROWS}
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records a phase of a test; counts the test after its last phase."""
        numbers = dict(report.user_properties).get(PROPERTY)
        if numbers is None:
            return
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.outcome != "passed" or name not in self._outcomes:
            self._outcomes[name] = "failed" if hasattr(report, "wasxfail") else report.outcome
        if report.when == "teardown":
            for number in str(numbers).split():
                self._count(self.proofs[number], self._outcomes[name], self._seconds[name])

    def _count(self, proof: Proof, outcome: str, seconds: float) -> None:
        proof.seconds += seconds
        setattr(proof, outcome, getattr(proof, outcome) + 1)

    @property
    def is_complete(self) -> bool:
        """Whether every row is proven or excused."""
        return all(proof.is_proven or proof.is_excused for proof in self.proofs.values())


def lines(proofs: Iterable[Proof]) -> list[str]:
    """The table for a terminal, without the long sentences of the page."""
    shown = [f"{'row':4} {'tests':>5} {'seconds':>8}  {'fault':60.60}  result"]
    for proof in proofs:
        row = proof.row
        shown.append(f"{row.number:4} {proof.num_tests:5} {proof.seconds:8.1f}  {row.fault:60.60}  {proof.status}")
    return shown


def page(text: str, proofs: Iterable[Proof], today: datetime.date) -> str:
    """The page with a new table, between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"the page has no place for the table: {BEGIN} and {END} are missing")
    cells = ["| # | fault | what happens | result | tests | seconds |", "|---|---|---|---|---|---|"]
    for proof in proofs:
        row = proof.row
        cells.append(
            f"| {row.number} | {row.fault} | {row.outcome} | {proof.status} | {proof.num_tests} | {proof.seconds:.1f} |"
        )
    table = "\n".join(cells)
    return f"{before}{BEGIN}\nRun on {today.isoformat()}.\n\n{table}\n{END}{after}"
