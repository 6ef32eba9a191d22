"""Gossip: silos average their models with each other, and no server holds one.

The core is pure: no clock, socket or file. Read in this order: `topology.py` is the table `[mode]` of the job file, the
edges of a round and the mixing weights of those that both ends confirmed, `mixing.py` what one silo computes (plain
gossip, push-sum, CHOCO) and the files that silos exchange, `state.py` how far apart they are. `coordinator.py` is that
of one job: what silos announce and confirm in, whom they exchange with and their rows of W out. `ring.py` is a ring
all-reduce with pairwise masks, which needs the extra `privacy`.

`steps.py` has the messages between a silo and a daemon.

Two shells drive it. The simulator has no messages, so it needs neither `steps.py` nor `RingMember`, whose masks change
no result. Of a real job, `fedplat.rounds.protocols.gossip` is the coordinator's place among the others,
`fedplat_server.protocols` has the daemon's calls, and `fedplat_client._protocols.gossip` is the silo.
`count_turns`, `gap_of`, `spectral_gap`, `choco_gamma`, `choco_rate` and `measure_quality` are for those who choose a
topology and a step size.
"""

from __future__ import annotations

from fedplat.gossip.mixing import choco_gamma, choco_rate, combine, compress, follow, measure_quality, mix
from fedplat.gossip.state import Consensus, distance_from_mean, measure_consensus
from fedplat.gossip.topology import (
    Edges,
    Gossip,
    Links,
    count_turns,
    draw_edges,
    gap_of,
    metropolis,
    mix_all,
    push_all,
    push_sum,
    spectral_gap,
)

__all__ = [
    "Consensus",
    "Edges",
    "Gossip",
    "Links",
    "choco_gamma",
    "choco_rate",
    "combine",
    "compress",
    "count_turns",
    "distance_from_mean",
    "draw_edges",
    "follow",
    "gap_of",
    "measure_consensus",
    "measure_quality",
    "metropolis",
    "mix",
    "mix_all",
    "push_all",
    "push_sum",
    "spectral_gap",
]
