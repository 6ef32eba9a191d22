"""The long poll of a client that is free: it waits for work, and leaves the waiting room however that ends."""

from __future__ import annotations

from fedplat.rounds.commands import Assign, Refuse, RetryWindow
from fedplat.rounds.events import ClientCheckedIn, ClientLeft
from fedplat.rounds.states import Reason
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.runner import Runner

RETRY_SOON = RetryWindow(0.0, 1.0)


async def wait_for_work(runner: Runner, desk: LongPolls, event: ClientCheckedIn, wait_s: float) -> Assign | Refuse:
    """Returns as soon as the client has an assignment, or is refused after `wait_s`. Raises `StoreError`."""
    client_id = event.client_id
    with desk.waiting(client_id) as place:
        try:
            await runner.submit(event, place.open)
            await place.wait(wait_s)
            if not place.is_answered:
                # Its time is over; the coordinator may have assigned it this very moment.
                await runner.submit(ClientLeft(client_id))
        finally:
            if place.answer is None and desk.is_latest(client_id, place):
                runner.post(ClientLeft(client_id))  # the connection is gone, or the daemon sent it away
        return place.answer or Refuse(client_id, Reason.NOT_SELECTED, RETRY_SOON)
