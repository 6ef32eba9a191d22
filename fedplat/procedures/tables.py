"""The table of a site as procedures read it: columns of numbers, by name."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedplat import texts
from fedplat.errors import ProcedureError


class ColumnFrame(Protocol):
    """Columns by name: a data frame of pandas or polars, a table of pyarrow, or a dictionary of arrays."""

    def __getitem__(self, name: str, /) -> Any:
        """Return a column that NumPy can read."""
        ...


class SiteTable:
    """The rows of one site.

    Messages of its errors have names of columns that were asked for, types and counts, and never values.
    """

    def __init__(self, frame: ColumnFrame) -> None:
        self._frame = frame

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column as 64-bit floats, NaN where a value is missing.

        Raises `ProcedureError` if there is no such column, or if it has something else than numbers.
        """
        column = texts.quote(name)
        try:
            values = self._frame[name]
        except Exception as exc:  # each kind of frame has its own
            raise ProcedureError(f"the table has no column {column} ({texts.name_type(exc)})") from exc
        array = np.asarray(values)
        if array.ndim != 1:
            raise ProcedureError(f"column {column} has {array.ndim} dimensions; expected one value for each row")
        if array.dtype.kind == "O" and not any(isinstance(each, (str, bytes)) for each in array):
            with contextlib.suppress(TypeError, ValueError):  # what is no number is refused below
                array = np.asarray(values, np.float64)  # None and NA become NaN
        if array.dtype.kind not in "biuf":
            raise ProcedureError(f"column {column} is of the type {array.dtype}; expected numbers")
        return array.astype(np.float64)
