"""Procedures: programs that ask all sites for exact sums, compute, and ask again (docs/procedures.md).

Read in this order: `sums.py` has the replies, integers with declared bounds and steps, and their sums; `contract.py`
what a procedure is; `tables.py` what it reads at a site, and `groups.py` selects and groups its rows. `means.py`,
`covariances.py` and `counts.py` are procedures, `runs.py` runs one over tables of this process, and `versions.py` has
one as the versions of a job. The core is pure: no clock or socket; only `fedplat.tables` opens files.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedplat.config.plugins import Kind, by_name, define
from fedplat.errors import ProcedureError
from fedplat.procedures.contract import METHODS, Finished, Json, Procedure, ReplyDisclosure, Step
from fedplat.procedures.counts import Counts
from fedplat.procedures.covariances import Covariances
from fedplat.procedures.means import Means
from fedplat.procedures.runs import ProcedureResult, run
from fedplat.procedures.sums import ExactSum, ReplySchema, ReplyTensor, ReplyTotals
from fedplat.procedures.tables import SiteTable
from fedplat.tables.columns import BooleanColumn, CategoryColumn, Column, DateColumn, NumericColumn
from fedplat.tables.dictionary import TableDictionary
from fedplat.tables.sources import ColumnFrame

PROCEDURES: Mapping[str, type[Procedure]] = by_name(Means, Covariances, Counts)
"""The options record of each built-in procedure, by its name in a job file."""
PROCEDURE = define(Kind("procedures", "kind", "a procedure", Procedure, METHODS, PROCEDURES))
"""The kind of procedures, which jobs name in the table `[procedure]`."""

__all__ = [
    "BooleanColumn",
    "CategoryColumn",
    "Column",
    "ColumnFrame",
    "Counts",
    "Covariances",
    "DateColumn",
    "ExactSum",
    "Finished",
    "Json",
    "Means",
    "NumericColumn",
    "Procedure",
    "ProcedureError",
    "ProcedureResult",
    "ReplyDisclosure",
    "ReplySchema",
    "ReplyTensor",
    "ReplyTotals",
    "SiteTable",
    "Step",
    "TableDictionary",
    "run",
]
