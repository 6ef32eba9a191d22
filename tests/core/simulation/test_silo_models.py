"""The models of silos are the same, bit for bit, as when a driver of their own simulated them.

`support.simulation.silo_models` describes and writes the digests.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from support.simulation import silo_models

KEPT: Final[dict[str, Any]] = json.loads(silo_models.FILE.read_text())


@pytest.mark.parametrize("case", silo_models.CASES)
def test_silos_have_the_same_models_as_before(case: str) -> None:
    assert silo_models.digest_models(case) == KEPT[case]


def test_each_kept_digest_is_compared() -> None:
    assert [*KEPT] == [*silo_models.CASES]
