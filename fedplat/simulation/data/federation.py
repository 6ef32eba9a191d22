"""The data of a simulated fleet: examples, and the examples of each client.

A source loads a `Dataset`; a partitioner assigns its examples to clients; together they are a `Federation`, which
engines train on. All arrays are NumPy arrays: only engines convert them to PyTorch tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError

Array = npt.NDArray[Any]
Part = npt.NDArray[np.int64]
"""The indices of one client's examples."""
_KEEP = 3
"""The purpose of a random generator, in its seed sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Examples before they are partitioned: `inputs[i]` belongs to `targets[i]`.

    `groups[i]` is the natural owner of example i (a speaker, a writer) as an index into `group_names`; None if the data
    has no natural owners. `columns` are further values of each example, for partitions. `classes` are the names of the
    classes that targets count, if the data has names. Raises `ValueError` if the lengths disagree or there are no
    examples.
    """

    inputs: Array
    targets: Array
    test_inputs: Array
    test_targets: Array
    groups: Part | None = None
    group_names: tuple[str, ...] = ()
    columns: Mapping[str, Array] = dataclasses.field(default_factory=dict[str, Array])
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_pair(self.inputs, self.targets, "")
        _check_pair(self.test_inputs, self.test_targets, "test_")
        if len(self.inputs) == 0:
            raise ValueError("there are no examples; expected at least one")
        if self.groups is not None and len(self.groups) != len(self.inputs):
            raise ValueError(f"groups has {len(self.groups)} entries, but there are {len(self.inputs)} examples")
        for name, values in self.columns.items():
            if len(values) != len(self.inputs):
                raise ValueError(
                    f"the column {name!r} has {len(values)} values, but there are {len(self.inputs)} examples"
                )

    @classmethod
    def from_arrays(cls, inputs: Array, targets: Array, test: tuple[Array, Array] | None = None) -> Dataset:
        """Create a data set without natural owners; without `test` it has no test data."""
        held_out = (inputs[:0], targets[:0]) if test is None else test
        return cls(inputs, targets, *held_out)


@dataclasses.dataclass(frozen=True, slots=True)
class Federation:
    """Examples and their clients: client i trains on those that `parts[i]` lists, in that order.

    `test_inputs` and `test_targets` are the central test data, which no client has. Client i also has the examples that
    `held_out[i]` lists: it does not train on them, but scores models on them (empty: no client has such examples).
    `names` are the clients' names in the data, if it has them (speakers, writers), and `classes` those of the classes.
    Raises `ValueError` if a client has no example, or one that does not exist, and if lengths disagree.
    """

    inputs: Array
    targets: Array
    parts: Sequence[Part]
    test_inputs: Array
    test_targets: Array
    names: tuple[str, ...] = ()
    held_out: Sequence[Part] = ()
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_pair(self.inputs, self.targets, "")
        _check_pair(self.test_inputs, self.test_targets, "test_")
        if len(self.parts) == 0:
            raise ValueError("there are no clients; expected at least one part")
        if len(self.held_out) not in (0, len(self.parts)):
            raise ValueError(f"held_out has {len(self.held_out)} parts for {len(self.parts)} clients")
        for kind, parts in (("", self.parts), (" held-out", self.held_out)):
            for client, part in enumerate(parts):
                if len(part) == 0:
                    raise ValueError(f"client {client} has no{kind} examples; expected at least one for every client")
                if part.min() < 0 or part.max() >= len(self.inputs):
                    expected = f"expected 0 to {len(self.inputs) - 1}"
                    raise ValueError(f"client {client} has examples {part.min()} to {part.max()}; {expected}")
        if self.names and len(self.names) != len(self.parts):
            raise ValueError(f"there are {len(self.names)} names for {len(self.parts)} clients")

    @property
    def num_clients(self) -> int:
        """The number of clients, each of which has data."""
        return len(self.parts)

    def num_examples(self, client: int) -> int:
        """Return the number of a client's training examples."""
        return len(self.parts[client])

    def num_held_out(self, client: int) -> int:
        """Return the number of a client's held-out examples."""
        return len(self.held_out[client]) if self.held_out else 0

    def examples(self, client: int) -> tuple[Array, Array]:
        """Return copies of the inputs and targets that a client trains on."""
        part = self.parts[client]
        return self.inputs[part], self.targets[part]

    def sizes(self) -> Part:
        """Return the number of training examples of each client."""
        return np.array([len(part) for part in self.parts], np.int64)

    def sizes_held_out(self) -> Part:
        """Return the number of held-out examples of each client."""
        return np.array([self.num_held_out(client) for client in range(self.num_clients)], np.int64)

    def with_held_out(self, fraction: float, seed: int) -> Federation:
        """Return the same clients, each of which keeps a part of its examples from training, to score models on.

        Each client holds out at least one example and trains on at least one; they are drawn independently for each
        client. Raises `DataError` if a client has a single example.
        """
        parts: list[Part] = []
        held_out: list[Part] = []
        for client, part in enumerate(self.parts):
            if len(part) < 2:
                raise DataError(
                    f"client {client} has a single example and cannot hold it out from training; use fewer clients "
                    "or a larger min_examples, or leave simulation.held_out out"
                )
            count = min(max(1, round(fraction * len(part))), len(part) - 1)
            rng = np.random.default_rng(np.random.SeedSequence([seed, _KEEP, client]))
            is_out = np.zeros(len(part), np.bool_)
            is_out[rng.choice(len(part), count, replace=False)] = True
            parts.append(part[~is_out])
            held_out.append(part[is_out])
        return dataclasses.replace(self, parts=parts, held_out=held_out)


def _check_pair(inputs: Array, targets: Array, prefix: str) -> None:
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise ValueError(
            f"{prefix}inputs have shape {list(inputs.shape)} and {prefix}targets {list(targets.shape)}; "
            "expected arrays whose first dimension is the number of examples"
        )
