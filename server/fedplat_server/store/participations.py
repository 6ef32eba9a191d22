"""The part of the store's port about what selection asks of the past."""

from __future__ import annotations

from typing import Protocol

from fedplat.rounds import JobState, Participation, rounds_to_recall

ROUNDS_AT_ONCE = 50
"""Rounds that one query reads, so that a job of many large rounds is not in memory as a whole."""


class ParticipationStore(Protocol):
    """Who took part in what."""

    async def participations(self, job_id: str, rounds: range) -> list[Participation]:
        """The assignments of a job's attempts to train in these rounds.

        By round and attempt; in each by the order of the reports, and after them those without one.
        """
        ...


async def read_back(store: ParticipationStore, job: JobState) -> list[Participation]:
    """All that the coordinator has to remember of a job's clients after a restart."""
    rounds = rounds_to_recall(job)
    found: list[Participation] = []
    for start in range(0, len(rounds), ROUNDS_AT_ONCE):
        found += await store.participations(job.job_id, rounds[start : start + ROUNDS_AT_ONCE])
    return found
