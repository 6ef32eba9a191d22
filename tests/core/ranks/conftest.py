"""A pair of ranks for most tests."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.ranks.group import RankGroup, Zygote


@pytest.fixture(scope="session")
def pair(zygote: Zygote) -> Generator[RankGroup]:
    with zygote.group(2) as group:
        yield group
