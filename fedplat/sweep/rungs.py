"""Early stopping: which configurations end at a rung, a round that all of them have reached.

The decision depends only on scores at that round, never on the time or the order in which runs were computed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from fedplat.sweep.options import MedianStopping, Stopping, SuccessiveHalving


def choose_stopped(stopping: Stopping, scores: Mapping[int, float], earlier: Sequence[float] = ()) -> set[int]:
    """Return the numbers of the configurations to stop.

    `scores` are larger for better configurations, and -inf for those without a finite metric; `earlier` are the scores
    of configurations of earlier batches at the same rung. At least one configuration continues. Of equal ones, those
    with the smallest numbers are the better ones.

    >>> choose_stopped(SuccessiveHalving(rounds=[5]), {1: 0.3, 2: 0.9, 3: 0.5})
    {1}
    >>> choose_stopped(MedianStopping(rounds=[5]), {1: 0.3, 2: 0.9, 3: 0.5})
    {1}
    """
    best_first = sorted(scores, key=lambda number: (-scores[number], number))
    match stopping:
        case SuccessiveHalving():
            # Rounded first: 0.7 * 10 is slightly more than 7 in floating point.
            return set(best_first[max(1, math.ceil(round(stopping.keep * len(scores), 9))) :])
        case MedianStopping():
            known = [*earlier, *scores.values()]
            if len(known) < stopping.min_configurations:
                return set()
            median = statistics.median(known)
            return {number for number in best_first[1:] if scores[number] < median}
