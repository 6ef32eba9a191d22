"""The error of all checks, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Subject = TypeVar("Subject")


class ConformanceError(AssertionError):
    """A plugin does not keep the contract of its kind; `check` is the name of the check that failed."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


def run_checks(checks: Iterable[Callable[[Subject], Iterator[str]]], subject: Subject) -> None:
    """Run checks, each of which yields a sentence for each violation. Raises `ConformanceError` for the first one."""
    for check in checks:
        for violation in check(subject):
            raise ConformanceError(check.__name__.removeprefix("check_"), violation)
