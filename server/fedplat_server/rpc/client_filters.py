"""The filters of the list of clients. Whether a client waits or works is only in memory."""

from __future__ import annotations

import dataclasses

from fedplat.rounds import Coordinator
from fedplat.wire.v1 import admin_pb2
from fedplat_server.config import Limits
from fedplat_server.database.clients import ClientFilter
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import validation


@dataclasses.dataclass(frozen=True)
class ClientSelection:
    """The clients of a list; their number is that of `counted`, less that of `less`, plus `num_known`."""

    which: ClientFilter
    counted: ClientFilter | None
    less: ClientFilter | None = None
    num_known: int = 0


def select(coordinator: Coordinator, request: admin_pb2.ListClientsRequest, limits: Limits) -> ClientSelection:
    """Return the clients that a request selects. Raises `RefusedError` if it is not valid."""
    conditions = ClientFilter(
        population=validation.name(request.population, "population") if request.population else None,
        labels=validation.labels(request.labels, limits),
        search=validation.search(request.search).lower(),
    )
    current = dataclasses.replace(conditions, is_revoked=False)
    busy = list(coordinator.busy_clients)
    match request.state:
        case "":
            return ClientSelection(conditions, conditions)
        case "revoked":
            revoked = dataclasses.replace(conditions, is_revoked=True)
            return ClientSelection(revoked, revoked)
        case "busy":
            which = dataclasses.replace(current, only=busy)
            return ClientSelection(which, which)
        case "waiting":
            waiting = _list_waiting(coordinator, conditions)
            return ClientSelection(dataclasses.replace(current, only=waiting), None, None, len(waiting))
        case "away":
            waiting = _list_waiting(coordinator, conditions)
            which = dataclasses.replace(current, without=[*waiting, *busy])
            return ClientSelection(which, current, dataclasses.replace(current, only=busy), -len(waiting))
        case _:
            text = f"state is {request.state[:80]!r}; expected waiting, busy, away or revoked, or none for all"
            raise RefusedError(Code.INVALID_REQUEST, text)


async def count(store: ClientStore, selected: ClientSelection) -> int:
    """Return the number of selected clients."""
    counted = await store.count_clients(selected.counted) if selected.counted is not None else 0
    less = await store.count_clients(selected.less) if selected.less is not None else 0
    return max(counted - less + selected.num_known, 0)


def _list_waiting(coordinator: Coordinator, which: ClientFilter) -> list[str]:
    """Return the waiting clients that satisfy the conditions on population, labels and id."""
    waiting = coordinator.room.clients.values()
    if which.population is not None:
        waiting = [client for client in waiting if client.population == which.population]
    if which.search:
        waiting = [client for client in waiting if which.search in client.client_id]
    for name, value in which.labels.items():
        waiting = [client for client in waiting if client.labels.get(name) == value]
    busy = coordinator.busy_clients
    return [client.client_id for client in waiting if client.client_id not in busy]
