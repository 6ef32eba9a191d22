"""What the server notes of a client that checks in."""

from __future__ import annotations

from collections.abc import Mapping

from fedplat_server.auth.client_directory import ClientDirectory, Offer
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.database.clients import ClientRecord


class Presence:
    """Notes that a client is there, and free."""

    def __init__(self, clients: ClientDirectory, availability: AvailabilityTracker, progress: ProgressTracker) -> None:
        self._clients = clients
        self._availability = availability
        self._progress = progress

    async def note(self, client: ClientRecord, labels: Mapping[str, str], version: str, offer: Offer) -> ClientRecord:
        """Store the labels and the software of a client that checks in; return its record as it is now."""
        client = await self._clients.update(client, labels, version)
        self._clients.record_offer(client.client_id, offer)
        self._availability.record(client.client_id, client.population)
        self._progress.drop_overdue(client.client_id)
        return client
