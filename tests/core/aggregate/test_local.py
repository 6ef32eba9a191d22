"""What local steps count for."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.aggregate.local import effective_steps


@pytest.mark.parametrize("num_steps", [1, 2, 7, 40])
def test_effective_steps_of_momentum_equal_the_papers_closed_form(num_steps: int) -> None:
    """Wang et al. 2020, Section 4.1."""
    m = 0.9
    expected = (num_steps - m * (1 - m**num_steps) / (1 - m)) / (1 - m)
    assert effective_steps(num_steps, learning_rate=0.1, momentum=m, pull=0) == pytest.approx(expected)


def test_effective_steps_of_a_pull_are_a_geometric_sum() -> None:
    """The same place: aᵢ = [(1 - αη)^(τ-1), ..., 1]."""
    expected = np.sum((1 - 0.1 * 0.5) ** np.arange(12))
    assert effective_steps(12, learning_rate=0.1, momentum=0, pull=0.5) == pytest.approx(expected)
    assert effective_steps(12, learning_rate=0.1, momentum=0, pull=0) == 12
