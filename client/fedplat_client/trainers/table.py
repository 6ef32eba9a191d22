"""A table of the client's owner, which answers the procedures of jobs (docs/procedures.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import numpy.typing as npt

from fedplat.model import Parameters
from fedplat.procedures import Procedure, SiteTable
from fedplat.tables.dictionary import Columns
from fedplat.tables.files import Frame
from fedplat_client.task import Task


class TableTrainer:
    """Answers procedures with sums of a table; no code and no rows are exchanged.

    ```python
    client = Client.from_ticket()
    client.add_trainer("patients", TableTrainer("patients.csv", "columns.toml"))
    client.run()
    ```

    Args:
        frame: a data frame of pandas or polars, a table of pyarrow, a dictionary of lists, the path of a file, or a
            whole `SiteTable`.
        columns: the dictionary of the columns, or the path of its file; by default a procedure may read all columns.
        person: the column that names the persons; by default that of the dictionary.
    """

    def __init__(self, frame: Frame | SiteTable, columns: Columns | None = None, person: str | None = None) -> None:
        self.table = frame if isinstance(frame, SiteTable) else SiteTable(frame, columns, person)

    def answer(self, procedure: Procedure, message: Parameters) -> Mapping[str, npt.ArrayLike]:
        """Return the reply to a message of a procedure. Raises `ProcedureError` for data that does not fit it."""
        return procedure.answer(message, self.table)

    def __call__(self, task: Task) -> NoReturn:
        """Refuse to train: the job asks no procedure."""
        raise ValueError(f"{task.name} is a table, which only answers procedures; expected a job with [procedure]")
