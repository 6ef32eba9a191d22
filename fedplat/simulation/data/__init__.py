"""The data of a simulated fleet: sources of examples, and partitioners that divide them between clients.

>>> import numpy as np
>>> dataset = Dataset.from_arrays(np.zeros((10, 2), np.float32), np.arange(10) % 2)
>>> federation = deal(dataset, partitioners.Classes(clients=4, classes_per_client=1), seed=0)
>>> [federation.targets[part].tolist() for part in federation.parts]
[[0, 0, 0], [1, 1, 1], [0, 0], [1, 1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from fedplat.config.plugins import name_of
from fedplat.errors import DataError
from fedplat.simulation.data import partitioners, sources
from fedplat.simulation.data.federation import Dataset, Federation, Part
from fedplat.simulation.data.partitioners import Partition
from fedplat.simulation.data.sources import DataSource, SourcePaths, data_folder

_HOLD_OUT, _DEAL = 1, 2
"""The purpose of a random generator: the last number of its seed sequence."""


def deal(dataset: Dataset, partition: Partition, seed: int) -> Federation:
    """Divide examples between clients, by the partition's own seed or else by `seed`.

    Raises `DataError` if the partition is impossible or leaves a client without an example.
    """
    entropy = seed if partition.seed is None else partition.seed
    rng = np.random.default_rng(np.random.SeedSequence([entropy, _DEAL]))
    parts = [np.asarray(part) for part in partition.split(dataset, rng)]
    for client, part in enumerate(parts):
        if part.ndim != 1 or (part.size and not np.issubdtype(part.dtype, np.integer)):
            raise DataError(
                f'the partition "{name_of(partition)}" gives client {client} {part.dtype}{list(part.shape)}; expected '
                "the indices of its examples"
            )
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise DataError(f"the partition leaves client {empty[0]} without an example; use fewer clients")
    try:
        return Federation(
            dataset.inputs,
            dataset.targets,
            parts,
            dataset.test_inputs,
            dataset.test_targets,
            names=_names(dataset, partition, parts),
            classes=dataset.classes,
        )
    except ValueError as exc:
        raise DataError(f'the partition "{name_of(partition)}": {exc}') from exc


def _names(dataset: Dataset, partition: Partition, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the clients' names in the data, if the partition is that of the data."""
    if isinstance(partition, partitioners.Natural) and dataset.groups is not None and dataset.group_names:
        return tuple(dataset.group_names[dataset.groups[part[0]]] for part in parts)
    if isinstance(partition, partitioners.Column):
        return tuple(str(dataset.columns[partition.column][part[0]]) for part in parts)
    return ()


def federation(
    source: DataSource, partition: Partition | None, *, seed: int = 0, folder: Path | None = None
) -> Federation:
    """Load the data of a fleet, as described by the tables `[simulation.data]` and `[simulation.partition]`.

    Files are relative to `folder` (by default the working directory). If a source has no test data, the examples that
    are held out do not depend on the seed, so that runs with different seeds have the same test data. Raises
    `DataError`.
    """
    rng = np.random.default_rng(np.random.SeedSequence([_HOLD_OUT]))
    columns = tuple(getattr(partition, "columns", ()))
    loaded = cast(object, source.load(SourcePaths(folder or Path.cwd(), data_folder(), rng, columns)))
    if not isinstance(loaded, Dataset | Federation):
        found = f"an object of type {type(loaded).__name__}"
        raise DataError(f'the source "{name_of(source)}" returned {found}; expected a Dataset or a Federation')
    if isinstance(loaded, Federation):
        if partition is not None:
            raise DataError("the data is already partitioned over clients; leave [simulation.partition] out")
        return loaded
    return divide(loaded, partition, seed)


def divide(dataset: Dataset, partition: Partition | None, seed: int) -> Federation:
    """Divide examples between clients; without a partition, between the owners in the data. Raises `DataError`."""
    if partition is None:
        if dataset.groups is None:
            raise DataError("the data is not partitioned: add a table [simulation.partition] with a scheme")
        partition = partitioners.Natural()
    return deal(dataset, partition, seed)


__all__ = [
    "DataSource",
    "Dataset",
    "Federation",
    "Part",
    "Partition",
    "deal",
    "divide",
    "federation",
    "partitioners",
    "sources",
]
