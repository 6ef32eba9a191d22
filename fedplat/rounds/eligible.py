"""The waiting clients that one job may draw from.

A million may wait, and a thousand be drawn a hundred times over. So entering and leaving take constant time, drawing k
of them uniformly takes time that grows with k, and the next round finds the pool as it is: nothing is rebuilt, and no
client is looked at again, unless its rest has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedplat.rounds.events import ClientCheckedIn
from fedplat.rounds.participation import NEVER, ParticipationHistory
from fedplat.rounds.records import AttemptKey
from fedplat.sampling import ClientHistory

Accepts = Callable[[ClientCheckedIn], bool]


class EligibleClients:
    """The eligible clients of a round, as `sampling.Candidates`; those that have to rest stand beside them.

    They lie in an array without gaps: whoever leaves is replaced by the last. The order, and so what a seed draws,
    depends on nothing but who came and went.
    """

    def __init__(self, accepts: Accepts, memory: ParticipationHistory | None, key: AttemptKey) -> None:
        self.key = key
        self._accepts = accepts
        self._memory = memory
        self._clients: list[ClientCheckedIn] = []
        self._places: dict[str, int] = {}
        # Who rests, by the round from which it may be drawn; and who may be drawn for this round, but not for the next.
        self._resting: dict[int, dict[str, ClientCheckedIn]] = {}
        self._until: dict[str, int] = {}
        self._again: dict[str, None] = {}
        # Who of those that rest will never be drawn again, unless this very round is tried again.
        self._spent: set[str] = set()
        # Who takes part in the attempt already, and those of them that wait.
        self._attempt: AttemptKey | None = None
        self._barred: Mapping[str, object] = {}
        self._aside: dict[str, ClientCheckedIn] = {}

    @property
    def round(self) -> int:
        """The round that they are drawn for."""
        return self.key.round

    def __len__(self) -> int:
        """How many may be drawn."""
        return len(self._clients)

    @property
    def num_resting(self) -> int:
        """How many others wait that may be drawn in a later round."""
        return len(self._until) - len(self._spent)

    @property
    def num_spent(self) -> int:
        """How many others wait that took part in as many rounds as they may."""
        return len(self._spent)

    def __getitem__(self, index: int) -> ClientCheckedIn:
        return self._clients[index]

    @property
    def utilities(self) -> Sequence[float]:
        """See `sampling.Candidates`."""
        return self._memory.utilities if self._memory is not None else ()

    def values_of(self, label: str) -> list[str | None]:
        """One label of all that may be drawn."""
        return [client.labels.get(label) for client in self._clients]

    def list_known(self) -> list[tuple[int, ClientHistory]]:
        """The numbers and the past of those that took part before; looks at the fewer of the known and the waiting."""
        pasts = self._memory.clients if self._memory is not None else {}
        places = self._places
        if len(pasts) < len(places):
            found = [(places[client_id], past) for client_id, past in pasts.items() if client_id in places]
        else:
            found = [(place, pasts[client_id]) for client_id, place in places.items() if client_id in pasts]
        return sorted(found, key=lambda each: each[0])

    def enter(self, client: ClientCheckedIn) -> None:
        """A client that is not in it waits."""
        if self._accepts(client):
            self._put(client)

    def leave(self, client_id: str) -> None:
        """A client, which may be in it or not, waits no longer."""
        place = self._places.pop(client_id, None)
        if place is not None:
            last = self._clients.pop()
            if place < len(self._clients):
                self._clients[place] = last
                self._places[last.client_id] = place
            self._again.pop(client_id, None)
        elif (until := self._until.pop(client_id, None)) is not None:
            del self._resting[until][client_id]
            self._spent.discard(client_id)
        else:
            self._aside.pop(client_id, None)

    def advance_to(self, key: AttemptKey) -> None:
        """A later attempt begins: for whoever has rested, or whose attempt at the same round came to nothing."""
        assert key >= self.key
        if key == self.key:
            return
        moved = [self._clients[self._places[client_id]] for client_id in self._again]
        # Those who took part in the latest round rest longest, but for those who have had their share.
        latest = max((until for until in self._resting if until < NEVER), default=0)
        if key.round > self.key.round:
            latest = 0
        self.key = key
        for until in [until for until in self._resting if until <= key.round or until == latest]:
            moved += self._resting[until].values()
        for client in moved:
            self.leave(client.client_id)
            self._put(client)
        self._resting = {until: clients for until, clients in self._resting.items() if clients}

    def exclude(self, attempt: AttemptKey | None, barred: Mapping[str, object]) -> None:
        """Nobody of these may be drawn for an attempt. As long as it lasts, only those who were drawn come to them."""
        self._barred = barred
        if attempt == self._attempt:
            return
        self._attempt = attempt
        moved = [*self._aside.values(), *(self._clients[self._places[name]] for name in barred if name in self._places)]
        for client in moved:
            self.leave(client.client_id)
            self._put(client)

    def _put(self, client: ClientCheckedIn) -> None:
        client_id, memory = client.client_id, self._memory
        if memory is not None and (rest := memory.rounds_to_rest(client_id, self.round, self.key.number)):
            self._until[client_id] = until = min(self.round + rest, NEVER)
            self._resting.setdefault(until, {})[client_id] = client
            if memory.is_at_limit(client_id):
                self._spent.add(client_id)
            return
        if client_id in self._barred:
            self._aside[client_id] = client
            return
        if memory is not None and memory.rounds_to_rest(client_id, self.round + 1):
            self._again[client_id] = None
        self._places[client_id] = len(self._clients)
        self._clients.append(client)
