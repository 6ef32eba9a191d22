"""A table of the client's owner, which answers the procedures of jobs (docs/procedures.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy.typing as npt

from fedplat.model import Parameters
from fedplat.procedures import ColumnFrame, Procedure, SiteTable
from fedplat_client.task import Task


class TableTrainer:
    """Answers procedures with sums of a table; no code and no rows are exchanged.

    ```python
    client = Client.from_ticket()
    client.add_trainer("patients", TableTrainer(pd.read_csv("patients.csv")))
    client.run()
    ```

    Args:
        frame: a data frame of pandas or polars, a table of pyarrow, a dictionary of lists, or a whole `SiteTable`.
        options: further options of the `SiteTable` that is made of a frame.
    """

    def __init__(self, frame: ColumnFrame | SiteTable, **options: Any) -> None:
        self.table = frame if isinstance(frame, SiteTable) else SiteTable(frame, **options)

    def answer(self, procedure: Procedure, message: Parameters) -> Mapping[str, npt.ArrayLike]:
        """Return the reply to a message of a procedure. Raises `ProcedureError` for data that does not fit it."""
        return procedure.answer(message, self.table)

    def __call__(self, task: Task) -> NoReturn:
        """Refuse to train: the job asks no procedure."""
        raise ValueError(f"{task.name} is a table, which only answers procedures; expected a job with [procedure]")
