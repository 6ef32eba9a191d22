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
FILL_IN = "leave the row out of the data, or fill the value in"
"""What to do about a missing value."""
_KEEP = 3
"""The purpose of a random generator, in its seed sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Examples before they are partitioned: `inputs[i]` belongs to `targets[i]`.

    `groups[i]` is the natural owner of example i (a speaker, a writer) as an index into `group_names`; None if the data
    has no natural owners. `columns` are further values of each example, for partitions. `classes` are the names of the
    classes that targets count, if the data has names. Lists, tensors and columns of pandas become arrays, in their
    order. Raises `ValueError` if the lengths disagree or there are no examples, and `DataError` for values that are not
    numbers.
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
        _convert_arrays(self)
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
    def from_arrays(cls, inputs: Any, targets: Any, test: tuple[Any, Any] | None = None) -> Dataset:
        """Create a data set without natural owners; without `test` it has no test data.

        Texts in targets become classes, sorted by name; booleans become 0 and 1. Raises `DataError` for a missing
        value, with its row and column, and for what is not an array of numbers.
        """
        inputs, targets = as_array(inputs, "inputs"), as_array(targets, "targets", texts=True)
        held_out = inputs[:0], targets[:0]
        if test is not None:
            held_out = as_array(test[0], "test_inputs"), as_array(test[1], "test_targets", texts=True)
        names: tuple[str, ...] = ()
        if targets.dtype.kind == "U":
            names = tuple(np.unique(targets).tolist())
            if len(other := np.setdiff1d(held_out[1].astype(np.str_), names)):
                raise DataError(f"test_targets has the class {str(other[0])!r}, which no example in targets has")
            targets, held_out = np.searchsorted(names, targets), (held_out[0], np.searchsorted(names, held_out[1]))
        elif targets.dtype.kind == "b":
            targets, held_out = targets.astype(np.int64), (held_out[0], held_out[1].astype(np.int64))
        found = cls(inputs, targets, *held_out, classes=names)
        check_finite(found)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Federation:
    """Examples and their clients: client i trains on those that `parts[i]` lists, in that order.

    `test_inputs` and `test_targets` are the central test data, which no client has. Client i also has the examples that
    `held_out[i]` lists: it does not train on them, but scores models on them (empty: no client has such examples).
    `names` are the clients' names in the data, if it has them (speakers, writers), and `classes` those of the classes.
    Lists, tensors and columns of pandas become arrays, in their order. Raises `ValueError` if a client has no example,
    or one that does not exist, and if lengths disagree, and `DataError` for values that are not numbers.
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
        _convert_arrays(self)
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


def as_array(values: Any, name: str, *, texts: bool = False) -> Array:
    """Return values as an array of numbers, or of texts if these are allowed. Raises `DataError` for others."""
    try:
        array = np.asarray(values)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as exc:  # lists of unequal lengths, a tensor with gradients or on a GPU
        raise DataError(f"{name} cannot be an array: {exc}") from exc
    if not isinstance(values, np.ndarray) and not array.flags.writeable:
        array = array.copy()  # PyTorch warns about the read-only columns of pandas
    if np.ma.is_masked(values):
        raise DataError(f"{name} has masked values; {FILL_IN}")
    if array.dtype.kind == "O" and texts and all(isinstance(each, str) for each in array.flat):
        array = array.astype(np.str_)
    if array.dtype.kind not in ("biufU" if texts else "biuf") and array.dtype.name != "bfloat16":
        kind = "texts" if array.dtype.kind in "US" else f"values of the type {array.dtype}"
        classes = "; Dataset.from_arrays(inputs, targets) turns texts into classes" if name.endswith("targets") else ""
        raise DataError(f"{name} has {kind}; expected numbers of one type{classes}")
    return array


def check_finite(data: Dataset | Federation) -> None:
    """Raise `DataError` for a value that is NaN or infinite, with its row (from 1), its column and its client."""
    parts = data.parts if isinstance(data, Federation) else ()
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        values: Array = getattr(data, name)
        if values.dtype.kind != "f" or np.isfinite(values).all():
            continue
        row, *rest = np.argwhere(~np.isfinite(values))[0].tolist()
        owner = next((number for number, part in enumerate(parts) if row in part), None)
        client = "" if owner is None or name.startswith("test_") else f" of client {owner}"
        column = f", column {rest[0] + 1}" if len(rest) == 1 else f", at {rest}" if rest else ""
        raise DataError(f"{name}, row {row + 1}{client}{column}: {values[(row, *rest)]}; {FILL_IN}")


def _convert_arrays(data: Dataset | Federation) -> None:
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        values = getattr(data, name)
        if type(values) is not np.ndarray or values.dtype.kind not in "biuf":
            object.__setattr__(data, name, as_array(values, name))
