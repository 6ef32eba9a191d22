"""Gossip: silos average their models with each other, and no server holds one.

The core is pure: no clock, socket or file. Read in this order: `options.py` is the table `[mode]` of the job file,
`topology.py` the edges of a round, `weights.py` the mixing weights of those that both ends confirmed, `mixing.py` what
one silo computes (plain gossip, push-sum, CHOCO), `consensus.py` how far apart the silos are. `coordinator.py` is that
of one job: what silos announce and confirm in, whom they exchange with and their rows of W out. `ring.py` is a ring
all-reduce with pairwise masks, which needs the extra `privacy`.

The simulator drives all of it but `RingMember`, whose masks change no result. No daemon runs such jobs yet. So nothing
but tests calls these, which silos need for real exchanges: `RingMember`; in `fedplat.secure_aggregation.relay`, the
encryption of files through the server; in `fedplat_client._work.peers`, `PeerListener.offer`, `PeerFetcher`,
`seal_file` and `open_file`; and the option `peer_address`. `count_turns`, `gap_of`, `spectral_gap`, `choco_gamma`,
`choco_rate` and `measure_quality` are for those who choose a topology and a step size.
"""

from __future__ import annotations

from fedplat.gossip.consensus import Consensus, distance_from_mean, measure_consensus
from fedplat.gossip.mixing import choco_gamma, choco_rate, combine, compress, follow, measure_quality, mix
from fedplat.gossip.options import Gossip
from fedplat.gossip.topology import Edges, count_turns, draw_edges
from fedplat.gossip.weights import Links, gap_of, metropolis, mix_all, push_all, push_sum, spectral_gap

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
