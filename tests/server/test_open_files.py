"""The limit of open files is raised as far as it goes, and a low one is told of."""

from __future__ import annotations

import resource
from collections.abc import Generator
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from fedplat_server.cli import serving


@pytest.fixture
def limits() -> Generator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_becomes_what_this_user_may_have(limits: tuple[int, int]) -> None:
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    with capture_logs():
        assert serving.raise_open_file_limit() == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_low_limit_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", Mock(return_value=(256, resource.RLIM_INFINITY)))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with capture_logs() as said:
        assert serving.raise_open_file_limit() == 256
    assert [(one["log_level"], one["limit"]) for one in said] == [("warning", 256)]
