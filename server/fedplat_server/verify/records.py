"""Records of `verify`: what it reads besides jobs (`fedplat.rounds.invariants.records`), and its report."""

from __future__ import annotations

import dataclasses
from collections import Counter

from fedplat.rounds.invariants.records import JobUnit, Location
from fedplat_server.records.audit import AuditHead, AuditRow


@dataclasses.dataclass(frozen=True)
class AuditPart:
    """Some rows of the audit log, and its head before them."""

    before: AuditHead
    rows: tuple[AuditRow, ...]


@dataclasses.dataclass(frozen=True)
class AuditEnd:
    """The head of the audit log according to its rows, and the stored head; None if that is missing."""

    end: AuditHead
    head: AuditHead | None


Unit = JobUnit | AuditPart | AuditEnd
"""A part of the database that is read and checked at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A violated invariant: its place, what was found and expected, and advice for the operator.

    `check` is the name of the function that found it.
    """

    invariant: str
    check: str
    place: Location
    found: str
    expected: str
    advice: str

    def __str__(self) -> str:
        where = f"{self.place}: " if str(self.place) else ""
        return f"{self.invariant}: {where}{self.found}; expected {self.expected}. {self.advice}"


@dataclasses.dataclass
class Report:
    """The result of `verify`. `notes` are not violations; `checked` has the numbers of checked items by name."""

    findings: list[Finding] = dataclasses.field(default_factory=list[Finding])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    checked: Counter[str] = dataclasses.field(default_factory=Counter[str])
