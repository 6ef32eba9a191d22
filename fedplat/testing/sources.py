"""The checks of data sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data import Dataset, DataSource, Federation
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
    run_checks(CHECKS, SourceUnderTest(adopt(options, DataSource), folder or Path.cwd()))


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


CHECKS = (
    check_the_source_returns_examples,
    check_examples_are_finite_arrays,
    check_test_examples_have_the_same_shape,
    check_a_seed_loads_the_same_examples,
)
