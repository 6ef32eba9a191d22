"""How often clients took part, in jobs that limit it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fedplat_server.verify.records import Place, Turns, Wrong

ADVICE = "Report this. If the job is private, its epsilon is larger than it says: account for it anew, or keep it back."


def takes_part_seldom_enough(turns: Turns) -> Iterator[Wrong]:
    """Between two rounds of a client are as many as its job says, and it took part in no more than it may.

    A private job's promise rests on it. An attempt that was abandoned counts, but those of one round count once.
    """
    rest, most = turns.spec.selection.min_separation, turns.spec.max_participations
    for client_id, rounds in turns.rounds.items():
        for before, after in itertools.pairwise(rounds):
            if after - before <= rest:
                found = f"it took part in round {before}, too"
                expected = f"{rest} rounds in between (selection.min_separation)"
                yield Wrong(Place(turns.job.job_id, after, client=client_id), found, expected)
        if 0 < most < len(rounds):
            found, expected = f"it took part in {len(rounds)} rounds", f"{most} at most (privacy.max_participations)"
            yield Wrong(Place(turns.job.job_id, client=client_id), found, expected)
