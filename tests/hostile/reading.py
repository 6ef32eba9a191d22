"""Whether operators can still read what hostile clients left in a database: every list, and a job's whole history."""

from __future__ import annotations

from collections.abc import Callable

from fedplat.admin import AdminClient
from fedplat.errors import FedplatError


def unreadable(admin: AdminClient, *jobs: str) -> list[str]:
    """What cannot be read, and why. The jobs must have ended, because their history is read to the end."""
    calls: dict[str, Callable[[], object]] = {
        "clients": admin.list_clients,
        "jobs": admin.list_jobs,
        "enrollments": admin.list_enrollments,
        "operators": admin.list_operators,
        "rounds": lambda: [admin.list_rounds(job, all_attempts=True) for job in jobs],
        "versions": lambda: [admin.list_versions(job) for job in jobs],
        "history": lambda: [sum(1 for _ in admin.watch_job(job)) for job in jobs],
        "audit log": lambda: sum(1 for _ in admin.iter_audit()),
        "privacy": admin.show_privacy,
    }
    found: list[str] = []
    for name, call in calls.items():
        try:
            call()
        except FedplatError as exc:
            found.append(f"the {name} cannot be read: {str(exc)[:300]}")
    return found
