"""Where the rows of a table come from: a source has the names of columns, and yields rows of those that are asked for.

Nothing is opened before a name or a row is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from fedplat import texts
from fedplat.errors import ProcedureError

Batch: TypeAlias = Mapping[str, Any]
"""Columns by name, each with the same number of values."""


class ColumnFrame(Protocol):
    """Columns by name: a data frame of pandas or polars, a table of pyarrow, or a dictionary of arrays."""

    def __getitem__(self, name: str, /) -> Any:
        """Return a column that NumPy can read."""
        ...


class TableSource(Protocol):
    """The rows of a table. Raises `ProcedureError` for what cannot be read, without any of its values."""

    is_text: ClassVar[bool]
    """Whether all values are text that has yet to be read as numbers."""

    def read_names(self) -> list[str] | None:
        """Return the names of the columns, of which one may occur twice; None if they are not known."""
        ...

    def read_batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield the rows of some columns, all of which the table has once."""
        ...


@dataclasses.dataclass(frozen=True)
class FrameSource:
    """A data frame of pandas or polars, a table of pyarrow, or a dictionary of arrays."""

    frame: ColumnFrame
    is_text: ClassVar[bool] = False

    def read_names(self) -> list[str] | None:
        """Return the names of the columns, None for a frame that has no list of them."""
        frame: Any = self.frame
        if isinstance(frame, Mapping):
            return [str(name) for name in cast(Mapping[object, Any], frame)]
        for attribute in ("column_names", "columns"):  # of pyarrow, whose `columns` are not names; of the others
            if (names := getattr(frame, attribute, None)) is not None:
                return [str(name) for name in names]
        return None

    def read_batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows."""
        batch: dict[str, Any] = {}
        for name in names:
            try:
                batch[name] = self.frame[name]
            except Exception as exc:  # each kind of frame has its own
                shown = texts.quote(name)
                raise ProcedureError(f"the table has no column {shown} ({texts.name_type(exc)})") from exc
        yield batch
