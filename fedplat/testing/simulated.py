"""The checks of data sources, partitions, and fleet models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np

from fedplat.errors import DataError, PluginError, UserCodeError
from fedplat.simulation.clients import availability
from fedplat.simulation.clients.distributions import Distribution, Floats, draw
from fedplat.simulation.data import Dataset, DataSource, Federation, Part, Partition
from fedplat.simulation.data.sources import SourcePaths, data_folder
from fedplat.testing.errors import adopt, run_checks


@dataclasses.dataclass(frozen=True)
class SourceUnderTest:
    """A source, and the folder that its paths are relative to."""

    source: DataSource
    folder: Path

    def load(self, seed: int = 5) -> object:
        """Load the data with a generator of its own."""
        return self.source.load(SourcePaths(self.folder, data_folder(), np.random.default_rng(seed)))

    def load_known(self) -> Dataset | Federation:
        """Load data of the right type."""
        return cast("Dataset | Federation", self.load())


def check_source(options: DataSource, folder: Path | None = None) -> None:
    """Check a data source. Raises `ConformanceError` for the first check that fails.

    Its paths are relative to `folder`, by default the working directory.
    """
    run_checks(SOURCE_CHECKS, SourceUnderTest(adopt(options, DataSource), folder or Path.cwd()))


def check_the_source_returns_examples(tested: SourceUnderTest) -> Iterator[str]:
    """Require a data set, or the data of each client. Both check the lengths of their arrays themselves."""
    try:
        loaded = tested.load()
    except (DataError, ValueError) as exc:
        yield f"load() raises {type(exc).__name__}: {exc}"
        return
    if not isinstance(loaded, Dataset | Federation):
        yield f"load() returns a {type(loaded).__name__}; expected a Dataset or a Federation"


def check_examples_are_finite_arrays(tested: SourceUnderTest) -> Iterator[str]:
    """Require NumPy arrays of numbers, which engines convert to tensors."""
    loaded = tested.load_known()
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        array: object = getattr(loaded, name)
        if not isinstance(array, np.ndarray):
            yield f"{name} is a {type(array).__name__}; expected a NumPy array"
        elif array.dtype.kind not in "fiub":
            yield f"{name} is {array.dtype}; expected numbers"
        elif not np.isfinite(array).all():
            yield f"{name} has NaN or infinite entries"


def check_test_examples_have_the_same_shape(tested: SourceUnderTest) -> Iterator[str]:
    """Require test examples that the model of the training examples accepts."""
    loaded = tested.load_known()
    for name in ("inputs", "targets"):
        train, test = getattr(loaded, name), getattr(loaded, f"test_{name}")
        if len(test) and (test.shape[1:] != train.shape[1:] or test.dtype != train.dtype):
            yield (
                f"an example of test_{name} is {test.dtype}{list(test.shape[1:])}, and one of {name} "
                f"{train.dtype}{list(train.shape[1:])}; expected the same"
            )


def check_a_seed_loads_the_same_examples(tested: SourceUnderTest) -> Iterator[str]:
    """Require all randomness from `place.rng`, so that runs can be repeated and compared."""
    first, second = tested.load_known(), tested.load_known()
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        if not np.array_equal(getattr(first, name), getattr(second, name)):
            yield f"{name} differ when they are loaded again with the same generator; expected no other randomness"
            return


SOURCE_CHECKS = (
    check_the_source_returns_examples,
    check_examples_are_finite_arrays,
    check_test_examples_have_the_same_shape,
    check_a_seed_loads_the_same_examples,
)


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
    run_checks(PARTITION_CHECKS, PartitionUnderTest(adopt(options, Partition), dataset or make_dataset()))


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


PARTITION_CHECKS = (
    check_examples_stay_as_they_are,
    check_parts_are_indices_of_examples,
    check_each_client_has_an_example,
    check_an_example_belongs_to_one_client,
    check_a_seed_gives_the_same_parts,
)


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
