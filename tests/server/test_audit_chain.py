"""The chain of the audit log: what it notices, by property."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from fedplat_server.records.audit import AuditAction, AuditEntry, AuditHead, AuditRow, chain
from support.store import audit_log

entries = st.builds(
    AuditEntry,
    actor=st.text(),
    action=st.sampled_from(AuditAction),
    subject=st.text(),
    details=st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False)),
)
logs = st.lists(entries, min_size=2, max_size=6)
moments = st.floats(0, 4e9)


@given(logs, moments)
def test_a_log_is_fine_however_it_was_appended(log: list[AuditEntry], unix_s: float) -> None:
    rows, head = chain(log, unix_s, AuditHead())
    assert audit_log.find_problems(rows, head) == []
    one_by_one: list[AuditRow] = []
    at = AuditHead()
    for entry in log:
        more, at = chain([entry], unix_s, at)
        one_by_one += more
    assert (one_by_one, at) == (rows, head)


@given(logs, moments, st.data())
def test_whatever_is_changed_is_noticed(log: list[AuditEntry], unix_s: float, data: st.DataObject) -> None:
    rows, head = chain(log, unix_s, AuditHead())
    place = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(["sequence", "unix_s", "actor", "action", "subject", "details", "hash"]))
    old = getattr(rows[place], field)
    changed = old + 1 if isinstance(old, int | float) else old + "x"
    broken = [*rows[:place], dataclasses.replace(rows[place], **{field: changed}), *rows[place + 1 :]]
    if changed != old:  # adding 1 to a large float may change nothing
        assert audit_log.find_problems(broken, head)


@given(logs, moments, st.data())
def test_removed_rows_are_noticed_also_at_the_end(log: list[AuditEntry], unix_s: float, data: st.DataObject) -> None:
    rows, head = chain(log, unix_s, AuditHead())
    place = data.draw(st.integers(0, len(rows) - 1))
    assert audit_log.find_problems(rows[:place] + rows[place + 1 :], head)
    assert audit_log.find_problems(rows[:place], head)
    assert audit_log.find_problems(rows, AuditHead())


def test_a_log_that_was_computed_anew_does_not_fit_a_head_that_was_written_down() -> None:
    _, head = chain([AuditEntry("anna", AuditAction.JOB_CANCELLED)], 1.0, AuditHead())
    forged, _ = chain([AuditEntry("ben", AuditAction.JOB_CANCELLED)], 1.0, AuditHead())
    assert "rows at the end were removed, added or replaced" in audit_log.find_problems(forged, head)[0]
