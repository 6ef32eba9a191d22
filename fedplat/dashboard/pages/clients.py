"""The fleet: availability, labels and versions; the list of clients; one client with its history."""

from __future__ import annotations

import time
from collections import defaultdict

from fedplat.dashboard import formats, rendering
from fedplat.dashboard.charts import Chart, ChartSeries
from fedplat.dashboard.visit import PAGE_SIZE, Visit
from fedplat.wire.v1 import admin_pb2

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
