"""What simulated clients remember between their trainings, in whatever form an engine keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from fedplat.simulation.engines.interface import Work

Note = TypeVar("Note")


class ClientStates(Generic[Note]):
    """One note for each client that remembers something.

    A new note counts at once, and can be undone until the client begins its next work. `release` is given each note
    that nobody needs any more.
    """

    def __init__(self, release: Callable[[Note], object] = lambda note: None) -> None:
        self._release = release
        self._now: dict[int, Note] = {}
        self._before: dict[int, tuple[Work, Note | None]] = {}

    def begin(self, work: Work) -> Note | None:
        """What the client remembers as it begins a work; None if nothing."""
        _, before = self._before.pop(work.client, (None, None))
        if before is not None:
            self._release(before)
        return self._now.get(work.client)

    def put(self, work: Work, note: Note) -> None:
        """A work gave the client something to remember, instead of what it began with."""
        self._before[work.client] = work, self._now.get(work.client)
        self._now[work.client] = note

    def undo(self, work: Work) -> None:
        """A work's result did not count after all."""
        of, before = self._before.get(work.client, (None, None))
        if of != work:
            return
        del self._before[work.client]
        self._release(self._now.pop(work.client))
        if before is not None:
            self._now[work.client] = before

    def clear(self) -> None:
        """No client remembers anything."""
        for note in (*self._now.values(), *(before for _, before in self._before.values() if before is not None)):
            self._release(note)
        self._now, self._before = {}, {}

    def replace(self, notes: Mapping[int, Note]) -> None:
        """Gives clients these notes, instead of all that they had."""
        self.clear()
        self._now.update(notes)

    def __iter__(self) -> Iterator[tuple[int, Note]]:
        return iter(self._now.items())
