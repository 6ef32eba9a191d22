"""The data of a simulated fleet: examples, and who has which.

A `Dataset` is what a source gives; a partitioner says which of its examples each client has; together they are a
`Federation`, which training engines take. All of it is NumPy: torch is the engines' business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError

Array = npt.NDArray[Any]
Part = npt.NDArray[np.int64]
"""Indices of one client's examples."""
_KEEP = 3
"""What a generator is for, in its seed sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Examples before they are dealt out: `inputs[i]` belongs to `targets[i]`.

    `groups[i]` is the number of the natural owner of example i (a speaker, a writer), an index of `group_names`;
    None where the data has no natural owners. Raises `ValueError` where the lengths disagree.
    """

    inputs: Array
    targets: Array
    test_inputs: Array
    test_targets: Array
    groups: Part | None = None
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_pair(self.inputs, self.targets, "")
        _check_pair(self.test_inputs, self.test_targets, "test_")
        if len(self.inputs) == 0:
            raise ValueError("there are no examples; expected at least one")
        if self.groups is not None and len(self.groups) != len(self.inputs):
            raise ValueError(f"groups has {len(self.groups)} entries, but there are {len(self.inputs)} examples")

    @classmethod
    def from_arrays(cls, inputs: Array, targets: Array, test: tuple[Array, Array] | None = None) -> Dataset:
        """Examples without natural owners; without `test` there is nothing held out."""
        held_out = (inputs[:0], targets[:0]) if test is None else test
        return cls(inputs, targets, *held_out)


@dataclasses.dataclass(frozen=True, slots=True)
class Federation:
    """Examples and who has which: client i has those that `parts[i]` lists, in that order.

    The examples of `test_inputs` belong to nobody and score the model. Those that `held_out[i]` lists are client i's
    too: it does not train on them, but scores models with them (empty: no client has such examples). `names` says what
    clients are called where the data knows (speakers, writers). Raises `ValueError` where a client has no example, or
    one that does not exist.
    """

    inputs: Array
    targets: Array
    parts: Sequence[Part]
    test_inputs: Array
    test_targets: Array
    names: tuple[str, ...] = ()
    held_out: Sequence[Part] = ()

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
                    raise ValueError(f"client {client} has an example that is not there: {part.min()} to {part.max()}")
        if self.names and len(self.names) != len(self.parts):
            raise ValueError(f"there are {len(self.names)} names for {len(self.parts)} clients")

    @property
    def num_clients(self) -> int:
        """Number of clients, each of which has data."""
        return len(self.parts)

    def num_examples(self, client: int) -> int:
        """How many examples a client trains on."""
        return len(self.parts[client])

    def num_held_out(self, client: int) -> int:
        """How many examples a client scores models with."""
        return len(self.held_out[client]) if self.held_out else 0

    def examples(self, client: int) -> tuple[Array, Array]:
        """The inputs and targets that a client trains on, as copies."""
        part = self.parts[client]
        return self.inputs[part], self.targets[part]

    def sizes(self) -> Part:
        """How many examples each client trains on."""
        return np.array([len(part) for part in self.parts], np.int64)

    def sizes_held_out(self) -> Part:
        """How many examples each client scores models with."""
        return np.array([self.num_held_out(client) for client in range(self.num_clients)], np.int64)

    def holding_out(self, fraction: float, seed: int) -> Federation:
        """The same clients, each of which keeps a part of its examples from training, to score models with.

        It has one at least, and one at least is left. Which ones is drawn for each client by itself. Raises `DataError`
        where a client has a single example.
        """
        parts: list[Part] = []
        held_out: list[Part] = []
        for client, part in enumerate(self.parts):
            if len(part) < 2:
                raise DataError(
                    f"client {client} has a single example, and cannot keep one from its training; use fewer clients "
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
