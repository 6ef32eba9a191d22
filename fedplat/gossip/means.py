"""Which mean of a ring stands, of those that its silos report.

Two silos that report the same mean are enough: then it stands, and all others get it. One silo alone could report any
model, so the same silos repeat the ring, with the same shares and bound: their mean has the same bits, whatever the
order. If one of the others has left, they cannot. Then the report of one silo counts, because the difference of its
mean and one without the silo that left would reveal that silo's model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from fedplat.gossip.messages import RingCompleted
from fedplat.gossip.state import GossipState


def find_mean(
    state: GossipState, members: Collection[str], reports: Mapping[str, RingCompleted], following: Iterable[str]
) -> str | None:
    """Return the digest of the mean that stands; None if none does.

    `members` are those of the ring, and `following` those of a ring that would repeat it. Reports of excluded silos do
    not count.
    """
    counted = _drop_excluded(state, reports)
    digests = {event.digest for event in counted.values()}
    can_repeat = set(members) - counted.keys() <= set(following)
    if len(digests) != 1 or (len(counted) == 1 and can_repeat):
        return None
    return digests.pop()


def keep_unfinished(state: GossipState) -> GossipState:
    """Keep what is known of a ring whose mean does not stand, for reports of it that come late.

    A report of the ring before counts further if that had the same silos, and so the same mean.
    """
    late = _drop_excluded(state, state.completed)
    if not late and state.unfinished.keys() == state.offers.keys():
        late = _drop_excluded(state, state.late)
    return dataclasses.replace(state, unfinished=state.offers, late=late)


def _drop_excluded(state: GossipState, reports: Mapping[str, RingCompleted]) -> dict[str, RingCompleted]:
    return {silo: event for silo, event in reports.items() if silo not in state.excluded}
