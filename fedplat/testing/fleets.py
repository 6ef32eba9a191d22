"""The checks of fleet models: availability models and distributions of client properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from fedplat.errors import PluginError, UserCodeError
from fedplat.simulation.clients import availability
from fedplat.simulation.clients.distributions import Distribution, Floats, draw
from fedplat.testing.errors import adopt, run_checks

NUM_CLIENTS = 300
NUM_SPELLS = 30
DAY_S = 86_400.0


@dataclasses.dataclass(frozen=True)
class AvailabilityUnderTest:
    """An availability model."""

    options: availability.AvailabilityOptions

    def make(self, seed: int = 5) -> availability.Availability:
        """Build the model of a fleet, which checks each spell."""
        model = availability.build_availability(self.options, NUM_CLIENTS, np.random.default_rng(seed))
        return (
            model
            if isinstance(model, availability.CheckedAvailability)
            else availability.CheckedAvailability(model, "built-in")
        )


def check_availability(options: availability.AvailabilityOptions) -> None:
    """Check an availability model. Raises `ConformanceError` for the first check that fails."""
    run_checks(AVAILABILITY_CHECKS, AvailabilityUnderTest(adopt(options, availability.AvailabilityOptions)))


def list_clients() -> tuple[availability.Clients, Floats]:
    """Return all clients, and a moment for each, within a few days."""
    return np.arange(NUM_CLIENTS), np.random.default_rng(1).uniform(0.0, 3 * DAY_S, NUM_CLIENTS)


def check_spells_follow_each_other(tested: AvailabilityUnderTest) -> Iterator[str]:
    """Require spells that end after the moment, one after the other, from the start of the job on."""
    try:
        model = tested.make()
        clients, at = np.arange(NUM_CLIENTS), np.zeros(NUM_CLIENTS)
        for _ in range(NUM_SPELLS):
            _, end = model.spells(clients, at)
            at = np.where(np.isfinite(end), end, at)
    except (PluginError, UserCodeError) as exc:
        yield str(exc)


def check_spells_depend_only_on_the_client_and_the_moment(tested: AvailabilityUnderTest) -> Iterator[str]:
    """Require that a client's spells are the same in whatever order and company they are computed."""
    model, (clients, at) = tested.make(), list_clients()
    whole = model.spells(clients, at)
    some = np.random.default_rng(2).permutation(NUM_CLIENTS)[: NUM_CLIENTS // 3]
    if not _equal(model.spells(clients[some], at[some]), (whole[0][some], whole[1][some])):
        yield "the spells of some clients differ from those of the same clients among all; expected no memory"
    elif not _equal(model.spells(clients, at), whole):
        yield "the same spells, computed again, differ; expected no randomness but that of build()"


def check_a_seed_gives_the_same_fleet(tested: AvailabilityUnderTest) -> Iterator[str]:
    """Require all randomness from the generator, so that a simulation can be repeated."""
    clients, at = list_clients()
    if not _equal(tested.make().spells(clients, at), tested.make().spells(clients, at)):
        yield "two models that are built with the same generator differ; expected no other randomness"


def check_moments_within_a_spell_are_online(tested: AvailabilityUnderTest) -> Iterator[str]:
    """Require that a client is online in the whole spell, and offline before it."""
    model, (clients, at) = tested.make(), list_clients()
    begin, end = model.spells(clients, at)
    waits = np.isfinite(begin) & (begin > at)
    if waits.any():
        earlier = at[waits] + 0.9 * (begin[waits] - at[waits])
        if not np.allclose(model.spells(clients[waits], earlier)[0], begin[waits]):
            yield "a moment before a spell, the next spell is another one"
    online = np.isfinite(end) & np.isfinite(begin)
    start = np.maximum(begin, at)[online]
    middle = start + 0.5 * (end[online] - start)
    if (model.spells(clients[online], middle)[0] > middle).any():
        yield "in the middle of a spell, a client is offline"


def check_availability_leaves_its_arguments_alone(tested: AvailabilityUnderTest) -> Iterator[str]:
    """Require that arrays of the simulation are only read."""
    clients, at = list_clients()
    clients.flags.writeable = at.flags.writeable = False
    try:
        tested.make().spells(clients, at)
    except UserCodeError as exc:
        yield f"{exc}; expected that the arguments are only read"


def _equal(left: availability.Spells, right: availability.Spells) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


AVAILABILITY_CHECKS = (
    check_spells_follow_each_other,
    check_availability_leaves_its_arguments_alone,
    check_spells_depend_only_on_the_client_and_the_moment,
    check_a_seed_gives_the_same_fleet,
    check_moments_within_a_spell_are_online,
)


def check_distribution(options: Distribution, *, positive: bool = True) -> None:
    """Check a distribution of client properties. Raises `ConformanceError` for the first check that fails.

    With `positive`, as for speeds, values must be above 0.
    """
    run_checks((check_values_are_finite, check_a_seed_draws_the_same_values), (adopt(options, Distribution), positive))


def check_values_are_finite(tested: tuple[Distribution, bool]) -> Iterator[str]:
    """Require as many finite numbers as clients."""
    options, positive = tested
    for count in (0, 1, 10_000):
        try:
            drawn = draw(options, count, np.random.default_rng(1), "distribution", positive=positive)
        except (PluginError, UserCodeError) as exc:
            yield str(exc)
            return
        if drawn.shape != (count,) or not np.isfinite(drawn).all():
            yield f"draw({count}) returns {drawn.dtype}{list(drawn.shape)}; expected {count} finite numbers"


def check_a_seed_draws_the_same_values(tested: tuple[Distribution, bool]) -> Iterator[str]:
    """Require all randomness from the generator, so that a simulation can be repeated."""
    first, second = (tested[0].draw(1000, np.random.default_rng(7)) for _ in range(2))
    if not np.array_equal(first, second):
        yield "two draws with the same generator differ; expected no other randomness and no memory"
