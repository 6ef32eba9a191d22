"""One process that forks groups of ranks, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.ranks.group import Zygote


@pytest.fixture(scope="session")
def zygote() -> Generator[Zygote]:
    pytest.importorskip("torch")
    process = Zygote()
    yield process
    process.close()
