"""Modules that wait for the next task of a trainer, since a base may take minutes to load."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from fedplat.errors import FedplatError
from fedplat.pytorch.training.frozen_base import FrozenBase, check_base


class ModuleOfTasks(Protocol):
    """A module that a trainer uses for its tasks; `base` is None if all of its tensors are trained."""

    @property
    def base(self) -> FrozenBase | None:
        """The tensors that are not trained."""
        ...

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that are trained, by name."""
        ...


_Module = TypeVar("_Module", bound=ModuleOfTasks)


class IdleModules(Generic[_Module]):
    """The modules with a base that no task uses. One without a base is made for each task."""

    def __init__(self) -> None:
        self._waiting: list[_Module] = []

    def __reduce__(self) -> tuple[type[IdleModules[Any]], tuple[()]]:
        return IdleModules, ()  # another process makes its own

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def borrow(self, make: Callable[[], _Module], base_sha256: str, *, is_required: bool = True) -> Generator[_Module]:
        """Give the block a module that no other task uses. Raises `ModelError` if its base is not the job's.

        A job has to state the base if it `is_required`.

        Afterwards it waits for the next task, which loads all that was trained; also if the task was stopped or
        refused. After an error of the owner's code, or a change of the base, the next task makes a new one.
        """
        try:
            module = self._waiting.pop()
        except IndexError:
            module = make()
        try:
            check_base(module.base, base_sha256, is_required=is_required)
            yield module
        except FedplatError:
            self._put(module)
            raise
        self._put(module)

    def _put(self, module: _Module) -> None:
        if module.base is None or module.base.has_changed:
            return
        for parameter in module.parameters().values():  # a stop leaves the gradients of half a step
            parameter.grad = None
        self._waiting.append(module)
