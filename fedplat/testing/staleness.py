"""The checks of staleness weights."""

from __future__ import annotations

from collections.abc import Iterator

from fedplat.errors import PluginError, UserCodeError
from fedplat.modes import MAX_OF_PLUGIN, StalenessWeight, compute_weight
from fedplat.testing.errors import adopt, run_checks

AGES = (*range(200), 1_000, MAX_OF_PLUGIN)


def check_staleness(options: StalenessWeight) -> None:
    """Check a staleness weight. Raises `ConformanceError` for the first check that fails."""
    run_checks(CHECKS, adopt(options, StalenessWeight))


def list_weights(options: StalenessWeight) -> list[float]:
    """Return the weights of updates of all ages. Raises `PluginError` and `UserCodeError`."""
    return [compute_weight(options, age) for age in AGES]


def check_weights_are_finite(options: StalenessWeight) -> Iterator[str]:
    """Require a finite number of at least 0 for each age: a weight of NaN would make the model NaN."""
    try:
        list_weights(options)
    except (PluginError, UserCodeError) as exc:
        yield str(exc)


def check_fresh_updates_count(options: StalenessWeight) -> Iterator[str]:
    """Require that an update of the latest version has a weight: a buffer without any makes no version."""
    if not list_weights(options)[0] > 0.0:
        yield "weight(0) returns 0; expected a positive weight for updates of the latest version"


def check_an_age_has_one_weight(options: StalenessWeight) -> Iterator[str]:
    """Require no randomness and no memory: a restarted server computes the weights again."""
    if list_weights(options) != list_weights(options):
        yield "weight() returns another weight for the same staleness; expected no randomness and no memory"


CHECKS = (check_weights_are_finite, check_fresh_updates_count, check_an_age_has_one_weight)
