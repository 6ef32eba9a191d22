"""The lists of the server: privacy budgets, audit log, enrollments, operators, alerts and deliveries."""

from __future__ import annotations

import time

from fedplat.dashboard.rendering import Page
from fedplat.dashboard.visit import PAGE_SIZE, Visit, call_if_supported
from fedplat.wire.v1 import admin_pb2, events_pb2

SINCE = {"1": "the last day", "7": "the last week", "30": "the last 30 days"}
DELIVERY_STATES = ("pending", "delivered", "failed")
NUM_EVENTS = 30


def show_privacy(visit: Visit) -> Page:
    """Return the page `/privacy`."""
    found = visit.server.show_privacy()
    data = {"jobs": [job for job in found.jobs if job.is_private], "populations": found.populations}
    return Page("privacy.html", "Privacy budgets", data, section="privacy")


def list_audit(visit: Visit) -> Page:
    """Return the page `/audit`."""
    since = visit.choice("since", SINCE)
    request = admin_pb2.ListAuditRequest(
        page_size=PAGE_SIZE,
        page_token=visit.paging.token,
        newest_first=True,
        actor=visit.text("actor"),
        action=visit.text("action"),
        since_unix_s=time.time() - 86_400.0 * int(since) if since else 0.0,
    )
    found = visit.server.page(request)
    data = {
        "events": found.events,
        "request": request,
        "since": since,
        "all_since": SINCE,
        "pager": visit.pager(len(found.events), found.total, found.next_page_token),
    }
    return Page("audit.html", "Audit log", data, section="audit", is_live=False)


def list_enrollments(visit: Visit) -> Page:
    """Return the page `/enrollments`."""
    request = admin_pb2.ListEnrollmentsRequest(page_size=PAGE_SIZE, page_token=visit.paging.token)
    found = visit.server.page(request)
    data = {
        "enrollments": found.enrollments,
        "pager": visit.pager(len(found.enrollments), found.total, found.next_page_token),
    }
    return Page("enrollments.html", "Enrollments", data, section="enrollments")


def list_operators(visit: Visit) -> Page:
    """Return the page `/operators`."""
    data = {"operators": visit.server.list_operators()}
    return Page("operators.html", "Operators", data, section="operators", is_live=False)


def list_alerts(visit: Visit) -> Page:
    """Return the page `/alerts`: what needs attention, the latest events, and the deliveries to webhooks."""
    state = visit.choice("state", DELIVERY_STATES)
    events = events_pb2.ListEventsRequest(newest_first=True, page_size=NUM_EVENTS)
    deliveries = events_pb2.ListDeliveriesRequest(page_size=PAGE_SIZE, page_token=visit.paging.token, state=state)
    found = call_if_supported(lambda: visit.server.page(deliveries))
    rows = found.value.deliveries if found.value is not None else []
    data = {
        "status": visit.status,
        "events": call_if_supported(lambda: visit.server.page(events)),
        "webhooks": call_if_supported(lambda: visit.server.page(events_pb2.ListWebhooksRequest())),
        "deliveries": found,
        "states": DELIVERY_STATES,
        "state": state,
        "pager": visit.pager(len(rows), 0, found.value.next_page_token if found.value is not None else ""),
    }
    return Page("alerts.html", "Alerts", data, section="alerts")
