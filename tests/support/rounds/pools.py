"""What tests ask of a pool of clients."""

from __future__ import annotations

from fedplat.rounds import AttemptKey, Participation
from fedplat.rounds.demand import EligibleClients


def key(round_: int, number: int = 1) -> AttemptKey:
    return AttemptKey("j", round_, number)


def took_part(client_id: str, round_: int, number: int = 1) -> Participation:
    return Participation(client_id, round_, number, 0.0, None, {})


def names(pool: EligibleClients) -> set[str]:
    found = [pool[index].client_id for index in range(len(pool))]
    assert len(set(found)) == len(found)
    return set(found)
