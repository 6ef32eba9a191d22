"""Data from the user's own function."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from fedplat import errors, randomness
from fedplat.config import user_code
from fedplat.simulation.data.federation import Dataset, Federation, check_finite
from fedplat.simulation.data.sources.common import SourcePaths


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="function"):
    """The user's function `call`, "module:function" relative to the simulation file, with keyword `arguments`.

    It returns a `Federation` (without a table `[simulation.partition]`), a `Dataset`, or NumPy arrays
    `(inputs, targets)` or `(inputs, targets, test_inputs, test_targets)`.
    """

    call: user_code.Reference
    arguments: dict[str, bool | int | float | str] = {}

    def load(self, place: SourcePaths) -> Dataset | Federation:
        """Call the function. Raises `DataError` for a wrong result, `UserCodeError` if it is not found or fails."""
        with randomness.use_seeds(0):  # all runs have the same data, also if the function draws it
            data = user_code.call(self.call, place.folder, self.arguments)
        if isinstance(data, Dataset | Federation):
            check_finite(data)
            return data
        arrays = cast(tuple[Any, ...], data)
        if isinstance(data, tuple) and len(arrays) in (2, 4) and all(hasattr(item, "__len__") for item in arrays):
            try:
                return Dataset.from_arrays(arrays[0], arrays[1], (arrays[2], arrays[3]) if len(arrays) == 4 else None)
            except ValueError as exc:
                raise errors.DataError(f"{self.call} returned arrays that do not fit: {exc}") from exc
        raise errors.DataError(
            f"{self.call} returned a {type(data).__name__}; expected a Federation, a Dataset, or a tuple of two or "
            "four NumPy arrays (inputs, targets, test_inputs, test_targets)"
        )
