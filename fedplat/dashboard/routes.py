"""The addresses of the pages and of the actions. A page has one function, which returns its template and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from fedplat.dashboard.pages import actions, clients, jobs, overview, records, rounds
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.source import PageSource
from fedplat.dashboard.visit import Visit

PageFunction = Callable[[Visit], Page]


@dataclasses.dataclass(frozen=True)
class PageRoute:
    """A page."""

    path: str
    function: PageFunction


@dataclasses.dataclass(frozen=True)
class MenuEntry:
    """An entry of the menu, for operators with at least this role."""

    section: str
    path: str
    title: str
    role: str = "viewer"
    for_simulations: bool = False


PAGES = (
    PageRoute("/", overview.overview),
    PageRoute("/jobs", jobs.list_jobs),
    PageRoute("/jobs/{job}", jobs.show_job),
    PageRoute("/jobs/{job}/charts/{chart}", jobs.show_chart),
    PageRoute("/jobs/{job}/rounds", jobs.list_rounds),
    PageRoute("/jobs/{job}/rounds/{round}", rounds.show_round),
    PageRoute("/fleet", clients.show_fleet),
    PageRoute("/clients", clients.list_clients),
    PageRoute("/clients/{client}", clients.show_client),
    PageRoute("/privacy", records.show_privacy),
    PageRoute("/audit", records.list_audit),
    PageRoute("/enrollments", records.list_enrollments),
    PageRoute("/operators", records.list_operators),
    PageRoute("/alerts", records.list_alerts),
)
MENU = (
    MenuEntry("overview", "/", "Overview", for_simulations=True),
    MenuEntry("jobs", "/jobs", "Jobs", for_simulations=True),
    MenuEntry("fleet", "/fleet", "Fleet"),
    MenuEntry("privacy", "/privacy", "Privacy"),
    MenuEntry("alerts", "/alerts", "Alerts"),
    MenuEntry("audit", "/audit", "Audit log", "operator"),
    MenuEntry("enrollments", "/enrollments", "Enrollments", "operator"),
    MenuEntry("operators", "/operators", "Operators", "admin"),
)
ACTIONS: Mapping[str, actions.Action] = {
    "/jobs/{job}/start": actions.start,
    "/jobs/{job}/pause": actions.pause,
    "/jobs/{job}/resume": actions.resume,
    "/jobs/{job}/cancel": actions.cancel,
    "/jobs/{job}/rollback": actions.roll_back,
    "/clients/{client}/revoke": actions.revoke_client,
    "/enrollments/{enrollment}/revoke": actions.revoke_enrollment,
}
_RANKS = {"": 0, "viewer": 0, "operator": 1, "admin": 2}


def list_sections(source: PageSource, role: str) -> tuple[tuple[str, str, str], ...]:
    """Return the menu of an operator: section, address and title."""
    return tuple(
        (entry.section, entry.path, entry.title)
        for entry in MENU
        if (entry.for_simulations or not source.is_simulation) and _RANKS.get(role, 0) >= _RANKS[entry.role]
    )
