"""A pair of ranks for most tests."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.ranks.crew import Crew, Zygote


@pytest.fixture(scope="session")
def pair(zygote: Zygote) -> Generator[Crew]:
    with zygote.crew(2) as crew:
        yield crew
