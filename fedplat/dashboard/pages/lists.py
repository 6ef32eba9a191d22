"""The pages of the server's lists: fleet and clients; budgets, audit log, enrollments, operators and alerts."""

from __future__ import annotations

import time
from collections import defaultdict

from fedplat.dashboard import formats, rendering
from fedplat.dashboard.formats import Chart, ChartSeries
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.source import PAGE_SIZE, Visit, call_if_supported
from fedplat.wire.v1 import admin_pb2, events_pb2

CLIENT_STATES = ("waiting", "busy", "away", "revoked")
DAYS = {"1": "day", "7": "week", "30": "30 days", "365": "year"}
MAX_POPULATIONS = 6
"""Lines in the chart of availability: the largest populations."""


def show_fleet(visit: Visit) -> rendering.Page:
    """Return the page `/fleet`."""
    population = visit.text("population")
    days = visit.choice("days", DAYS) or "7"
    fleet = visit.server.show_fleet(population, time.time() - 86_400.0 * int(days))
    labels: defaultdict[str, list[admin_pb2.ValueCount]] = defaultdict(list)
    for each in fleet.labels:
        labels[each.name].append(each)
    data = {
        "fleet": fleet,
        "labels": dict(labels),
        "population": population,
        "days": days,
        "all_days": DAYS,
        "chart": availability(fleet),
        "num_clients": sum(each.num_clients for each in fleet.populations),
    }
    return rendering.Page("fleet.html", "Fleet", data, section="fleet", has_charts=True)


def availability(fleet: admin_pb2.ShowFleetResponse) -> Chart | None:
    """Return the chart of the clients that were seen in each hour; None without hours."""
    by_population: defaultdict[str, dict[float, int]] = defaultdict(dict)
    for each in fleet.hours:
        by_population[each.population][each.hour_unix_s] = each.num_seen
    hours = sorted({each.hour_unix_s for each in fleet.hours})
    if not hours:
        return None
    largest = sorted(by_population, key=lambda name: -max(by_population[name].values()))[:MAX_POPULATIONS]
    series = [
        ChartSeries(name, [float(by_population[name].get(hour, 0)) for hour in hours]) for name in sorted(largest)
    ]
    totals = [sum(hours_of.get(hour, 0) for hours_of in by_population.values()) for hour in hours]
    sentence = f"{formats.count(totals[-1])} clients checked in within the last hour"
    if len(totals) > 1:
        sentence += f", at least {formats.count(min(totals))} and at most {formats.count(max(totals))} in others"
    return Chart("availability", "Clients seen by hour", sentence + ".", hours, series, "time", "count")


def list_clients(visit: Visit) -> rendering.Page:
    """Return the page `/clients`."""
    label = visit.text("label")
    name, sign, value = label.partition("=")
    request = admin_pb2.ListClientsRequest(
        page_size=PAGE_SIZE,
        page_token=visit.paging.token,
        population=visit.text("population"),
        state=visit.choice("state", CLIENT_STATES),
        search=visit.text("search"),
    )
    if sign:
        request.labels[name.strip()] = value.strip()
    found = visit.server.page(request)
    data = {
        "clients": found.clients,
        "states": CLIENT_STATES,
        "request": request,
        "label": label,
        "label_problem": "" if sign or not label else "a label is written as name=value, such as region=eu",
        "pager": visit.pager(len(found.clients), found.total, found.next_page_token),
    }
    return rendering.Page("clients.html", "Clients", data, section="fleet")


def show_client(visit: Visit) -> rendering.Page:
    """Return the page of a client."""
    client = visit.server.show_client(visit.names["client"])
    found = visit.server.page(
        admin_pb2.ListAssignmentsRequest(client_id=client.client_id, page_size=PAGE_SIZE, page_token=visit.paging.token)
    )
    data = {
        "client": client,
        "assignments": found.assignments,
        "pager": visit.pager(len(found.assignments), found.total, found.next_page_token),
    }
    return rendering.Page("client.html", f"Client {client.client_id}", data, section="fleet")


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
