"""The checks of sampling policies, on fleets of different sizes, labels and histories, and of staleness weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedplat.errors import PluginError, UserCodeError
from fedplat.modes import MAX_OF_PLUGIN, StalenessWeight, compute_weight
from fedplat.sampling import ClientHistory, Labels, Policy
from fedplat.testing.errors import adopt, run_checks

SIZES = (0, 1, 2, 7, 40, 300)
COUNTS = (1, 2, 5, 40, 1000)
MAX_ROUNDS = 300
"""Number of rounds after which each of 40 clients must have been drawn, 8 in each round."""


@dataclasses.dataclass(frozen=True)
class ExampleFleet:
    """Clients that wait: their labels, and the history of those that took part before."""

    labels: Sequence[Labels]
    histories: Mapping[int, ClientHistory] = dataclasses.field(default_factory=dict[int, ClientHistory])
    round: int = 1
    utilities: Sequence[float] = (0.0,)

    def __len__(self) -> int:
        return len(self.labels)

    def values_of(self, label: str) -> list[str | None]:
        """Return one label of every client."""
        return [labels.get(label) for labels in self.labels]

    def list_known(self) -> list[tuple[int, ClientHistory]]:
        """Return the clients with a history."""
        return sorted(self.histories.items(), key=lambda item: item[0])


def make_fleet(total: int, labels: Mapping[str, Sequence[str]]) -> ExampleFleet:
    """Return clients of all kinds: with and without labels, new ones, and some that report impossible numbers."""
    strange = (
        ClientHistory(1, 1),
        ClientHistory(1, 1, num_examples=1e300, loss=1e300, duration_s=1e9),
        ClientHistory(1, 1, num_examples=0.0, loss=0.0, duration_s=0.0),
        ClientHistory(4, 1, num_examples=20.0, loss=0.5, duration_s=3.0),
    )
    return ExampleFleet(
        [{name: values[index % len(values)] for name, values in labels.items() if index % 5} for index in range(total)],
        {index: strange[index // 3 % len(strange)] for index in range(0, total, 3)},
        round=9,
        utilities=[0.0, 5.0, 4.0, 3.0, 2.0, 1e100, 0.0, 1.0, 1.0],
    )


@dataclasses.dataclass(frozen=True)
class PolicyUnderTest:
    """A policy, and the values of the labels that it uses."""

    policy: Policy
    labels: Mapping[str, Sequence[str]]

    def fleet(self, total: int) -> ExampleFleet:
        """Return clients with these labels."""
        return make_fleet(total, self.labels)

    def draw(self, fleet: ExampleFleet, count: int, seed: int = 7) -> list[int]:
        """Draw clients with a generator of its own."""
        return self.policy.draw(fleet, count, np.random.default_rng(seed))


def check_policy(options: Policy, labels: Mapping[str, Sequence[str]] | None = None) -> None:
    """Check a sampling policy. Raises `ConformanceError` for the first check that fails.

    `labels` are the values of the labels that the policy uses, such as `{"region": ["eu", "us"]}`.
    """
    run_checks(CHECKS, PolicyUnderTest(adopt(options, Policy), labels or {}))


def check_drawn_clients_are_different_candidates(tested: PolicyUnderTest) -> Iterator[str]:
    """Require the indices of different candidates, as many as asked for if there are so many."""
    for total in SIZES:
        for count in COUNTS:
            drawn: list[Any] = tested.draw(tested.fleet(total), count)
            most = total if tested.policy.is_trial else min(count, total)
            if not all(isinstance(index, int) and 0 <= index < total for index in drawn):
                expected = f"ints from 0 to {total - 1}" if total else "an empty list: there may be no candidates"
                yield f"draw() of {count} from {total} returns {str(drawn)[:80]}; expected {expected}"
            if len(set(drawn)) < len(drawn):
                yield f"draw() of {count} from {total} returns a candidate twice"
            if len(drawn) > most or (len(drawn) < most and not tested.policy.is_trial):
                yield f"draw() of {count} from {total} returns {len(drawn)} candidates; expected {most}"


def check_a_seed_draws_the_same_clients(tested: PolicyUnderTest) -> Iterator[str]:
    """Require all randomness from the generator, and no memory: a restarted server draws the same clients again."""
    first = tested.draw(tested.fleet(300), 40)
    tested.draw(tested.fleet(7), 5)
    if tested.draw(tested.fleet(300), 40) != first:
        yield "two draws with the same generator and candidates differ; expected no other randomness and no memory"


def check_candidates_do_not_change(tested: PolicyUnderTest) -> Iterator[str]:
    """Require that labels and histories stay as they are: they are the server's own."""
    fleet, copy = tested.fleet(300), tested.fleet(300)
    tested.draw(fleet, 40)
    if fleet != copy:
        yield "draw() changes the candidates; expected that it only reads them"


def check_only_policies_that_remember_use_histories(tested: PolicyUnderTest) -> Iterator[str]:
    """Require `remembers` of policies that use histories: for others the server keeps none."""
    if tested.policy.remembers:
        return
    with_histories = tested.fleet(300)
    without = dataclasses.replace(with_histories, histories={})
    if tested.draw(with_histories, 40) != tested.draw(without, 40):
        yield "the draw depends on the clients' histories, and remembers is false; expected remembers = True"


def check_each_client_is_drawn_some_time(tested: PolicyUnderTest) -> Iterator[str]:
    """Require that no client is excluded forever."""
    rng, labels = np.random.default_rng(3), tested.fleet(40).labels
    histories: dict[int, ClientHistory] = {}
    for round_number in range(1, MAX_ROUNDS + 1):
        utilities = [0.0] + [1.0] * (round_number - 1)
        for index in tested.policy.draw(ExampleFleet(labels, histories, round_number, utilities), 8, rng):
            histories[index] = ClientHistory(
                round_number, 1, num_examples=1.0 + index % 5, loss=1.0 + index, duration_s=float(index % 7)
            )
        if len(histories) == 40:
            return
    yield f"{40 - len(histories)} of 40 clients are not drawn in {MAX_ROUNDS} rounds of 8; expected every client"


CHECKS = (
    check_drawn_clients_are_different_candidates,
    check_a_seed_draws_the_same_clients,
    check_candidates_do_not_change,
    check_only_policies_that_remember_use_histories,
    check_each_client_is_drawn_some_time,
)


AGES = (*range(200), 1_000, MAX_OF_PLUGIN)


def check_staleness(options: StalenessWeight) -> None:
    """Check a staleness weight. Raises `ConformanceError` for the first check that fails."""
    run_checks(STALENESS_CHECKS, adopt(options, StalenessWeight))


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


STALENESS_CHECKS = (check_weights_are_finite, check_fresh_updates_count, check_an_age_has_one_weight)
