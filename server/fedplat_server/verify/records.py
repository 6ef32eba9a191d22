"""What `verify` reads beside jobs (`fedplat.rounds.invariants.records`), and what it reports."""

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
    """The head by the rows of the audit log, and the recorded one; None if that is missing."""

    end: AuditHead
    head: AuditHead | None


Unit = JobUnit | AuditPart | AuditEnd
"""What is read, and checked, at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A violated invariant: where, what was found instead of what, and advice for the operator.

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
    """The outcome. `notes` are worth knowing and violate nothing; `checked` counts what was read, by name."""

    findings: list[Finding] = dataclasses.field(default_factory=list[Finding])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    checked: Counter[str] = dataclasses.field(default_factory=Counter[str])
