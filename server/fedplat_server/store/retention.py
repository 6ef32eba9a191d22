"""What the server asks of its database to give up what is not needed any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Protocol

from fedplat.rounds import AttemptKey, ModelVersion

BATCH = 1000
"""How many versions are looked at in one transaction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """Which versions of a job keep their files. Version 0, the latest, and what clients work with are always kept.

    Models from version `models_from` on, and each whose number is a multiple of `every` (0: none); states from version
    `states_from` on.
    """

    models_from: int = 0
    every: int = 0
    states_from: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Removable:
    """A version of which files may go: the model's with its delta, or that of the rule's state, or both."""

    version: ModelVersion
    model: bool
    state: bool


class RetentionStore(Protocol):
    """Rows stay; they only say that their files are gone. Files are removed after that, never before."""

    async def removable(self, job_id: str, keep: Keep, limit: int = BATCH) -> list[Removable]:
        """The oldest versions of which files may go."""
        ...

    async def give_up(self, job_id: str, found: Collection[Removable]) -> frozenset[str]:
        """Notes that the files of these versions go; of them the digests that no row names any more.

        What has come to be needed since `removable` was asked is left out.
        """
        ...

    async def unreferenced(self, digests: Collection[str]) -> frozenset[str]:
        """Those of some digests that no row names."""
        ...

    async def old_attempts(self, job_id: str, before_unix_s: float, limit: int = BATCH) -> list[AttemptKey]:
        """The oldest attempts with a history that ended before a moment, and in which no client is at work."""
        ...

    async def remove_history(self, keys: Collection[AttemptKey], *, metrics: bool) -> int:
        """Removes the rows of the history of attempts and their assignments, and notes it; how many rows there were.

        With `metrics`, those of their assignments too, and what clients said beside them.
        """
        ...

    async def note_seen(self, seen_unix_s: Mapping[str, float]) -> None:
        """Notes when clients were last here."""
        ...
