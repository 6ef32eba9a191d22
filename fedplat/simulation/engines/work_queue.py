"""Works for others to train: which is next, which came back, and which nobody waits for any more."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fedplat.simulation.engines.interface import Work
from fedplat.simulation.engines.version_refs import Versions

Answer = TypeVar("Answer")


class WorkQueue(Generic[Answer]):
    """Begun works, by number. The longest is drawn first (Graham 1969: then those trained last are short).

    `versions` counts a work from its beginning until it is fetched or dropped; `num_examples` are those of a client.
    """

    def __init__(self, versions: Versions, num_examples: Callable[[int], float]) -> None:
        self._versions, self._num_examples = versions, num_examples
        self._count = itertools.count(1)
        self._numbers: dict[Work, int] = {}
        self._waiting: list[tuple[float, int, Work]] = []
        self._answers: dict[int, Answer] = {}
        self._dropped: dict[int, Work] = {}

    def __contains__(self, work: Work) -> bool:
        """Whether a work was begun, and neither fetched nor dropped."""
        return work in self._numbers

    def new_number(self) -> int:
        """A number that no work has, for whatever else is sent to those who train."""
        return next(self._count)

    def begin(self, works: Sequence[Work]) -> None:
        """Lets works wait to be drawn."""
        for work in works:
            number = self._numbers[work] = self.new_number()
            self._versions.begin(work)
            length = work.fraction * self._num_examples(work.client)
            heapq.heappush(self._waiting, (-length, number, work))

    def draw(self) -> tuple[int, Work] | None:
        """The work that is to be trained next, and its number; None if there is none."""
        while self._waiting:
            _, number, work = heapq.heappop(self._waiting)
            if number not in self._dropped:
                return number, work
            self._versions.end(self._dropped.pop(number))
        return None

    def put(self, number: int, answer: Answer) -> bool:
        """Keeps the answer to a drawn work; False if the work was dropped."""
        if number in self._dropped:
            self._versions.end(self._dropped.pop(number))
            return False
        self._answers[number] = answer
        return True

    def has_answer(self, work: Work) -> bool:
        """Whether a work's answer has come."""
        return self._numbers[work] in self._answers

    def fetch(self, work: Work) -> Answer:
        """The answer to a work, which is over with that."""
        self._versions.end(work)
        return self._answers.pop(self._numbers.pop(work))

    def drop(self, work: Work) -> Answer | None:
        """Nobody will fetch a work. Its answer, if that has come."""
        number = self._numbers.pop(work)
        if number not in self._answers:
            self._dropped[number] = work
            return None
        self._versions.end(work)
        return self._answers.pop(number)
