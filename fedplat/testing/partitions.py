"""The checks of partitions, on examples of ten classes and forty owners."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from fedplat.simulation.data import Dataset, Part, Partition
from fedplat.testing.errors import adopt, run_checks

NUM_EXAMPLES, NUM_CLASSES, NUM_OWNERS = 6_000, 10, 40


@dataclasses.dataclass(frozen=True)
class PartitionUnderTest:
    """A partition, and examples to divide."""

    partition: Partition
    dataset: Dataset

    def split(self, seed: int = 5) -> list[Part]:
        """Divide the examples with a generator of its own."""
        return self.partition.split(self.dataset, np.random.default_rng(seed))


def make_dataset() -> Dataset:
    """Return examples of ten classes and forty owners, who are also a column, in random order."""
    rng = np.random.default_rng(3)
    targets = rng.permutation(np.arange(NUM_EXAMPLES) % NUM_CLASSES)
    inputs = np.arange(NUM_EXAMPLES, dtype=np.float32)[:, None]
    owners = rng.integers(0, NUM_OWNERS, NUM_EXAMPLES)
    return Dataset(
        inputs,
        targets,
        inputs[:0],
        targets[:0],
        owners,
        tuple(f"owner {number}" for number in range(NUM_OWNERS)),
        {"owner": owners},
    )


def check_partition(options: Partition, dataset: Dataset | None = None) -> None:
    """Check a partition. Raises `ConformanceError` for the first check that fails.

    `dataset` are the examples to divide; by default 6,000 examples of 10 classes and 40 owners.
    """
    run_checks(CHECKS, PartitionUnderTest(adopt(options, Partition), dataset or make_dataset()))


def check_parts_are_indices_of_examples(tested: PartitionUnderTest) -> Iterator[str]:
    """Require an array of indices for each client."""
    total = len(tested.dataset.inputs)
    for client, part in enumerate(tested.split()):
        found = np.asarray(part)
        if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
            yield f"the part of client {client} is {found.dtype}{list(found.shape)}; expected a list of indices"
        elif found.size and (found.min() < 0 or found.max() >= total):
            yield f"client {client} has the examples {found.min()} to {found.max()}; expected indices below {total}"


def check_each_client_has_an_example(tested: PartitionUnderTest) -> Iterator[str]:
    """Require at least one client, and at least one example for each."""
    parts = tested.split()
    if not parts:
        yield "there are no clients"
    if empty := [client for client, part in enumerate(parts) if len(part) == 0]:
        yield f"{len(empty)} of {len(parts)} clients have no example, client {empty[0]} for instance"


def check_an_example_belongs_to_one_client(tested: PartitionUnderTest) -> Iterator[str]:
    """Require that no example is used twice."""
    dealt = np.concatenate(tested.split())
    if twice := len(dealt) - len(np.unique(dealt)):
        yield f"{twice} of {len(dealt)} examples belong to a client twice, or to two clients"


def check_a_seed_gives_the_same_parts(tested: PartitionUnderTest) -> Iterator[str]:
    """Require all randomness from the generator, so that a simulation can be repeated."""
    first, second = tested.split(), tested.split()
    if len(first) != len(second) or any(not np.array_equal(*pair) for pair in zip(first, second, strict=True)):
        yield "two splits with the same generator differ; expected no other randomness and no memory"


def check_examples_stay_as_they_are(tested: PartitionUnderTest) -> Iterator[str]:
    """Require that the data set is only read: other clients and the evaluation use its arrays."""
    arrays = {"inputs": tested.dataset.inputs, "targets": tested.dataset.targets}
    before = {name: array.copy() for name, array in arrays.items()}
    tested.split()
    for name, array in arrays.items():
        if array.tobytes() != before[name].tobytes():
            yield f"split() changes the {name} of the data set; expected that it only reads them"


CHECKS = (
    check_examples_stay_as_they_are,
    check_parts_are_indices_of_examples,
    check_each_client_has_an_example,
    check_an_example_belongs_to_one_client,
    check_a_seed_gives_the_same_parts,
)
