"""The whole audit log, which `fedplat-server verify` reads in parts."""

from __future__ import annotations

from collections.abc import Sequence

from fedplat_server.records.audit import AuditHead, AuditRow, check_end, check_rows, head_after


def find_problems(rows: Sequence[AuditRow], head: AuditHead) -> list[str]:
    """The problems of a log, one sentence each; an empty list if it is unchanged."""
    end = head_after(rows[-1]) if rows else AuditHead()
    return [*check_rows(rows, AuditHead()), *check_end(end, head)]
