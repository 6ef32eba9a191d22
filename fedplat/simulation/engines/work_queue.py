"""The queue of tasks that an engine hands to its workers, with the results that have arrived."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fedplat.errors import EngineError
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.version_refs import Versions

Answer = TypeVar("Answer")


def make_error(task: ClientTask, failure: str) -> EngineError:
    """Return the error of a task that failed in a worker."""
    return EngineError(f"{describe_task(task)} failed: {failure}")


def describe_task(task: ClientTask) -> str:
    """Return what a task does, for errors."""
    return f"the {'scoring' if task.scores else 'training'} of client {task.client}"


class WorkQueue(Generic[Answer]):
    """Numbered tasks. The longest is drawn first (Graham 1969), so the tasks that run last are short.

    `versions` counts a task from `begin` until it is fetched or dropped; `num_examples` returns those of a client.
    """

    def __init__(self, versions: Versions, num_examples: Callable[[int], float]) -> None:
        self._versions, self._num_examples = versions, num_examples
        self._count = itertools.count(1)
        self._numbers: dict[ClientTask, int] = {}
        self._waiting: list[tuple[float, int, ClientTask]] = []
        self._answers: dict[int, Answer] = {}
        self._dropped: dict[int, ClientTask] = {}

    def __contains__(self, task: ClientTask) -> bool:
        """Return whether a task was begun, and neither fetched nor dropped."""
        return task in self._numbers

    def new_number(self) -> int:
        """Return a number that no task has, for another kind of request to the workers."""
        return next(self._count)

    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Add tasks to the queue."""
        for task in tasks:
            number = self._numbers[task] = self.new_number()
            self._versions.begin(task)
            length = task.fraction * self._num_examples(task.client)
            heapq.heappush(self._waiting, (-length, number, task))

    def draw(self) -> tuple[int, ClientTask] | None:
        """Remove and return the next task with its number; None if the queue is empty."""
        while self._waiting:
            _, number, task = heapq.heappop(self._waiting)
            if number not in self._dropped:
                return number, task
            self._versions.end(self._dropped.pop(number))
        return None

    def put(self, number: int, answer: Answer) -> bool:
        """Store the answer to a drawn task; returns False if the task was dropped."""
        if number in self._dropped:
            self._versions.end(self._dropped.pop(number))
            return False
        self._answers[number] = answer
        return True

    def has_answer(self, task: ClientTask) -> bool:
        """Return whether the answer to a task has arrived."""
        return self._numbers[task] in self._answers

    def fetch(self, task: ClientTask) -> Answer:
        """Remove a finished task and return its answer."""
        self._versions.end(task)
        return self._answers.pop(self._numbers.pop(task))

    def drop(self, task: ClientTask) -> Answer | None:
        """Discard a task; returns its answer if that has arrived."""
        number = self._numbers.pop(task)
        if number not in self._answers:
            self._dropped[number] = task
            return None
        self._versions.end(task)
        return self._answers.pop(number)
