"""Modules that wait for the next task of a trainer, since a base may take minutes to load."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from fedplat.errors import FedplatError
from fedplat.pytorch.training.frozen_base import check_base
from fedplat.pytorch.training.learner import Trainee


class IdleTrainees:
    """The trainees with a base that no task uses. One without a base is made for each task."""

    def __init__(self) -> None:
        self._waiting: list[Trainee] = []

    def __reduce__(self) -> tuple[type[IdleTrainees], tuple[()]]:
        return IdleTrainees, ()  # another process makes its own

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def borrow(self, make: Callable[[], Trainee], base_sha256: str, *, is_required: bool = True) -> Generator[Trainee]:
        """Give the block a trainee that no other task uses. Raises `ModelError` if its base is not the job's.

        A job has to state the base if it `is_required`.

        Afterwards it waits for the next task, which loads all that was trained; also if the task was stopped or
        refused. After an error of the owner's code, or a change of the base, the next task makes a new one.
        """
        try:
            trainee = self._waiting.pop()
        except IndexError:
            trainee = make()
        try:
            check_base(trainee.base, base_sha256, is_required=is_required)
            yield trainee
        except FedplatError:
            self._put(trainee)
            raise
        self._put(trainee)

    def _put(self, trainee: Trainee) -> None:
        if trainee.base is None or trainee.base.has_changed:
            return
        for parameter in trainee.parameters().values():  # a stop leaves the gradients of half a step
            parameter.grad = None
        self._waiting.append(trainee)
