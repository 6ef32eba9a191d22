"""The scores of all ranks."""

from __future__ import annotations

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.training import Scores, Sums


def sum_scores(ranks: Ranks, scores: Scores) -> Sums:
    """Return the sum of the scores over all ranks, on all of them."""
    parts = ranks.all_gather(msgspec.msgpack.encode(scores.sums()))
    return Sums.total(msgspec.msgpack.decode(each, type=prepare_type(Sums)) for each in parts)
