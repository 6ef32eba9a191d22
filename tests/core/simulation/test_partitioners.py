"""What every partitioner promises, and what each of them does to labels and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest

from fedplat.errors import DataError
from fedplat.simulation.data import Dataset, Partition, deal, partitioners
from fedplat.simulation.data.federation import Federation
from fedplat.testing import check_partition

NUM_CLASSES = 10
NUM_EXAMPLES = 6_000


def dataset(num_examples: int = NUM_EXAMPLES, seed: int = 3) -> Dataset:
    rng = np.random.default_rng(seed)
    targets = rng.permutation(np.arange(num_examples) % NUM_CLASSES)
    empty = np.zeros((0, 1), np.float32), np.zeros(0, np.int64)
    inputs = np.arange(num_examples, dtype=np.float32)[:, None]
    owners = rng.integers(0, 40, num_examples)
    return Dataset(inputs, targets, *empty, owners, tuple(f"owner {number}" for number in range(40)), {"owner": owners})


CASES: Mapping[str, tuple[Partition, int, bool]] = {
    "iid": (partitioners.Iid(clients=7), 7, True),
    "shards": (partitioners.Shards(clients=20), 20, True),
    "dirichlet": (partitioners.Dirichlet(clients=10, alpha=0.3), 10, True),
    "hsu": (partitioners.Hsu(clients=20, alpha=0.3), 20, True),
    "quantity": (partitioners.Quantity(clients=30, min_examples=2), 30, True),
    "classes": (partitioners.Classes(clients=20, classes_per_client=3), 20, True),
    "fedprox": (partitioners.FedProx(clients=100, base=3), 100, False),  # rounding leaves examples over
    "natural": (partitioners.Natural(), 40, True),
    "column": (partitioners.Column(column="owner"), 40, True),
}
"""A partition, the number of clients that it makes, and whether every example belongs to a client."""


def label_counts(federation: Federation) -> np.ndarray:
    return np.array([np.bincount(federation.targets[part], minlength=NUM_CLASSES) for part in federation.parts])


def test_every_partitioner_has_a_row() -> None:
    assert CASES.keys() == partitioners.PARTITIONS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_public_checks(name: str) -> None:
    check_partition(CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_every_example_is_at_most_once_somebodys(name: str) -> None:
    partition, num_clients, is_complete = CASES[name]
    federation = deal(dataset(), partition, seed=0)
    dealt = np.concatenate(federation.parts)
    assert federation.num_clients == num_clients
    assert len(np.unique(dealt)) == len(dealt) == federation.sizes().sum()
    assert federation.sizes().min() >= 1
    assert (len(dealt) == NUM_EXAMPLES) == is_complete
    inputs, targets = federation.examples(3)
    np.testing.assert_array_equal(inputs[:, 0], federation.parts[3])
    np.testing.assert_array_equal(targets, federation.targets[federation.parts[3]])
    assert all(part.dtype == np.int64 for part in federation.parts)


@pytest.mark.parametrize("name", CASES)
def test_a_seed_decides_everything(name: str) -> None:
    partition, _, _ = CASES[name]
    first, same, other = (deal(dataset(), partition, seed=seed) for seed in (1, 1, 2))
    for one, two in zip(first.parts, same.parts, strict=True):
        np.testing.assert_array_equal(one, two)
    differs = any(not np.array_equal(one, two) for one, two in zip(first.parts, other.parts, strict=True))
    assert differs == (name not in ("natural", "column"))


def test_a_partition_may_have_a_seed_of_its_own() -> None:
    kept = partitioners.Iid(clients=5, seed=9)
    for one, two in zip(deal(dataset(), kept, seed=1).parts, deal(dataset(), kept, seed=2).parts, strict=True):
        np.testing.assert_array_equal(one, two)


def test_iid_is_even() -> None:
    assert set(deal(dataset(), partitioners.Iid(clients=7), 0).sizes()) == {857, 858}
    assert set(deal(dataset(), partitioners.Iid(clients=7, examples=10), 0).sizes()) == {10}


def test_shards_are_those_of_the_paper() -> None:
    """100 clients, 200 shards of sorted examples, two for each: at most four labels, mostly two."""
    federation = deal(dataset(60_000), partitioners.Shards(clients=100), 0)
    assert set(federation.sizes()) == {600}
    num_labels = (label_counts(federation) > 0).sum(axis=1)
    assert num_labels.max() <= 4
    assert np.median(num_labels) == 2
    limited = deal(dataset(60_000), partitioners.Shards(clients=10, shards_per_client=1, shard_size=5), 0)
    assert set(limited.sizes()) == {5}


def test_a_smaller_alpha_skews_labels_more() -> None:
    def concentration(partition: Partition) -> float:
        counts = label_counts(deal(dataset(), partition, 0))
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    for scheme in (partitioners.Dirichlet, partitioners.Hsu):
        skews = [concentration(scheme(clients=10, alpha=alpha)) for alpha in (0.1, 1.0, 100.0)]
        assert skews == sorted(skews, reverse=True)
        assert skews[0] > 0.4
        assert skews[-1] < 0.2


def test_dirichlet_draws_again_until_everyone_has_enough() -> None:
    sizes = deal(dataset(), partitioners.Dirichlet(clients=30, alpha=0.5, min_examples=60), 0).sizes()
    assert sizes.min() >= 60
    # A client that has its fair share (200) gets no further class, so each has less than that plus one whole class.
    assert sizes.max() < 200 + 600
    assert len(set(sizes)) > 10


def test_dirichlet_gives_up_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedplat.simulation.data.partitioners.MAX_DRAWS", 20)
    with pytest.raises(DataError, match="use a larger alpha, fewer clients or a smaller min_examples"):
        deal(dataset(), partitioners.Dirichlet(clients=60, alpha=0.01, min_examples=99), 0)


def test_hsu_keeps_sizes_even() -> None:
    assert set(deal(dataset(), partitioners.Hsu(clients=20, alpha=1e-3), 0).sizes()) == {300}
    assert set(deal(dataset(), partitioners.Hsu(clients=20, alpha=0.1, examples=50), 0).sizes()) == {50}


@pytest.mark.parametrize("distribution", ["lognormal", "powerlaw", "dirichlet"])
def test_quantity_skew_leaves_labels_alone(distribution: Literal["lognormal", "powerlaw", "dirichlet"]) -> None:
    partition = partitioners.Quantity(clients=20, distribution=distribution, min_examples=5)
    federation = deal(dataset(60_000), partition, 0)
    sizes = federation.sizes()
    assert sizes.sum() == 60_000
    assert sizes.min() >= 5
    assert sizes.max() > 4 * np.median(sizes)
    largest = label_counts(federation)[sizes.argmax()]
    assert largest.min() > 0.8 * largest.mean()


def test_power_law_sizes_are_exact() -> None:
    sizes = np.sort(deal(dataset(), partitioners.Quantity(clients=4, distribution="powerlaw", spread=1.0), 0).sizes())
    # Shares 1, 1/2, 1/3, 1/4 of 5,996 after one example for each: 2878.08, 1439.04, 959.36, 719.52.
    np.testing.assert_array_equal(sizes, [721, 960, 1440, 2879])


def test_whole_sizes_add_up() -> None:
    for total in range(7, 40):
        assert partitioners.whole_sizes(np.array([0.2, 0.5, 0.3]), total, 2).sum() == total


def test_classes_per_client() -> None:
    federation = deal(dataset(), partitioners.Classes(clients=20, classes_per_client=3), 0)
    counts = label_counts(federation)
    assert set((counts > 0).sum(axis=1)) == {3}
    assert all(counts[client, client % NUM_CLASSES] > 0 for client in range(20))
    for label in range(NUM_CLASSES):  # a class is divided evenly over those that have it
        owned = counts[counts[:, label] > 0, label]
        assert owned.max() - owned.min() <= 1


def test_fedprox_is_the_papers() -> None:
    federation = deal(dataset(60_000), partitioners.FedProx(), 0)
    counts = label_counts(federation)
    for client in (0, 9, 123, 999):
        assert set(np.flatnonzero(counts[client])) == {client % 10, (client + 1) % 10}
    assert counts[counts > 0].min() >= 5
    sizes = np.sort(federation.sizes())
    assert sizes[-100:].sum() > 0.5 * sizes.sum()  # a tenth of the clients has most of the data
    assert sizes.sum() > 0.95 * 60_000


def test_natural_parts_are_the_owners() -> None:
    whole = dataset()
    federation = deal(whole, partitioners.Natural(), 0)
    assert whole.groups is not None
    for part, name in zip(federation.parts, federation.names, strict=True):
        assert {f"owner {group}" for group in whole.groups[part]} == {name}
        assert (np.diff(part) > 0).all()
    some = deal(whole, partitioners.Natural(clients=5), 0)
    assert some.num_clients == 5
    assert set(some.names) < set(federation.names)
    threshold = int(np.median(federation.sizes()))
    large = deal(whole, partitioners.Natural(min_examples=threshold), 0)
    assert large.sizes().min() >= threshold
    assert large.num_clients < 40


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (partitioners.Iid(clients=7000), "needs at least 7000 examples; there are 6000"),
        (partitioners.Iid(clients=7, examples=1000), "7 clients with 1000 examples each needs at least 7000"),
        (partitioners.Shards(clients=4000), "8000 shards"),
        (partitioners.Dirichlet(clients=601), "10 for each of 601 clients"),
        (partitioners.Hsu(clients=10, examples=601), "10 clients with 601 examples each"),
        (partitioners.Quantity(clients=60, min_examples=101), "101 for each of 60 clients"),
        (partitioners.Classes(clients=5, classes_per_client=11), "the data has 10 classes"),
        (partitioners.Classes(clients=6001, classes_per_client=1), "use fewer clients"),
        (partitioners.FedProx(), "use fewer clients or a smaller base"),
        (partitioners.FedProx(classes_per_client=11), "the data has 10 classes"),
        (partitioners.Natural(clients=41), "expected 41 or more"),
        (partitioners.Natural(min_examples=5000), "0 of 40 owners have at least 5000 examples"),
    ],
)
def test_what_cannot_be_dealt_is_said_in_words(partition: Partition, words: str) -> None:
    with pytest.raises(DataError, match=words):
        deal(dataset(), partition, 0)


def test_labels_are_needed_for_a_partition_by_label() -> None:
    inputs = np.zeros((100, 1), np.float32)
    regression = Dataset.from_arrays(inputs, np.zeros(100, np.float32))
    with pytest.raises(DataError, match="needs one integer per example"):
        deal(regression, partitioners.Shards(clients=2), 0)
    assert deal(regression, partitioners.Iid(clients=2), 0).num_clients == 2
    with pytest.raises(DataError, match="the data has no owners of examples"):
        deal(regression, partitioners.Natural(), 0)
