"""Check-ins: what the server notes of a client that is free, and its long poll, which waits for an assignment."""

from __future__ import annotations

from collections.abc import Mapping

from fedplat.rounds.commands import Assign, Refuse, RetryWindow
from fedplat.rounds.events import ClientCheckedIn, ClientLeft
from fedplat.rounds.states import Reason
from fedplat_server.auth.client_directory import ClientDirectory, Offer
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord

RETRY_SOON = RetryWindow(0.0, 1.0)


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


async def wait_for_work(
    runner: Runner, long_polls: LongPolls, event: ClientCheckedIn, wait_s: float
) -> Assign | Refuse:
    """Return the client's assignment as soon as it has one, or a refusal after `wait_s`. Raises `StoreError`.

    The client leaves the coordinator's waiting room in every case.
    """
    client_id = event.client_id
    with long_polls.open_check_in(client_id) as check_in:
        try:
            await runner.submit(event, check_in.open)
            await check_in.wait(wait_s)
            if not check_in.is_answered:
                # Timed out; but the coordinator may assign the client at this moment.
                await runner.submit(ClientLeft(client_id))
        finally:
            if check_in.answer is None and long_polls.is_latest(client_id, check_in):
                runner.post(ClientLeft(client_id))  # the connection was lost, or the daemon released the call
        return check_in.answer or Refuse(client_id, Reason.NOT_SELECTED, RETRY_SOON)
