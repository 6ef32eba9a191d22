"""Data that the user's own function makes."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np

from fedplat import user_code
from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Federation
from fedplat.simulation.data.sources.paths import SourcePaths


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="function"):
    """`call` names it as `module:function`, relative to the simulation file; `arguments` are its keyword arguments.

    It returns a `Federation` (then there is no `[simulation.partition]`), a `Dataset`, or NumPy arrays
    `(inputs, targets)` or `(inputs, targets, test_inputs, test_targets)`.
    """

    call: user_code.Reference
    arguments: dict[str, bool | int | float | str] = {}

    def load(self, place: SourcePaths) -> Dataset | Federation:
        """The data. Raises `DataError`, and `UserCodeError` where the function is not found or fails."""
        made = user_code.call(self.call, place.folder, self.arguments)
        if isinstance(made, Dataset | Federation):
            return made
        arrays = cast(tuple[Any, ...], made)
        if isinstance(made, tuple) and len(arrays) in (2, 4) and all(isinstance(item, np.ndarray) for item in arrays):
            try:
                return Dataset.from_arrays(arrays[0], arrays[1], (arrays[2], arrays[3]) if len(arrays) == 4 else None)
            except ValueError as exc:
                raise DataError(f"{self.call} returned arrays that do not fit: {exc}") from exc
        raise DataError(
            f"{self.call} returned a {type(made).__name__}; expected a Federation, a Dataset, or a tuple of two or "
            "four NumPy arrays (inputs, targets, test_inputs, test_targets)"
        )
