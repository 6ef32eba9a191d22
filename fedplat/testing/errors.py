"""The error of all checks, and how they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

from fedplat.config import plugins, user_code
from fedplat.errors import FedplatError, MissingExtraError

Subject = TypeVar("Subject")
Contract = TypeVar("Contract")


class ConformanceError(AssertionError):
    """A plugin does not keep the contract of its kind; `check` is the name of the check that failed."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


@contextlib.contextmanager
def wrap_errors(check: str) -> Generator[None]:
    """Turn what a plugin raises within a check into a `ConformanceError` that names the line."""
    try:
        with user_code.wrap_errors("the plugin"):
            try:
                yield
            except ConformanceError as exc:  # an exception of the kit, and not of the plugin
                failed = exc
            else:
                return
    except MissingExtraError:
        raise
    except FedplatError as exc:
        raise ConformanceError(check, f"{exc} (expected no error)") from exc
    raise failed


def adopt(options: Contract, contract: type[Contract]) -> Contract:
    """Return options as if a file had named their class. Raises `ConformanceError` if they lack what the kind needs."""
    with wrap_errors("interface"):
        return plugins.adopt(options, contract)


def run_checks(checks: Iterable[Callable[[Subject], Iterator[str]]], subject: Subject) -> None:
    """Run checks, each of which yields a sentence for each violation.

    Raises `ConformanceError` for the first one, and for an exception of the plugin.
    """
    for check in checks:
        name = check.__name__.removeprefix("check_")
        with wrap_errors(name):
            for violation in check(subject):
                raise ConformanceError(name, violation)
