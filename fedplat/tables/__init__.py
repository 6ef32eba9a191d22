"""Tables of sites: where their rows come from, and what their owner declares about the columns.

Read in this order: `columns.py` has the types of columns, which procedures and owners declare alike; `dictionary.py`
what an owner adds, such as other names; `sources.py` reads frames, `files.py` files; `values.py` turns their columns
into arrays of one type, and counts what does not fit; `conditions.py` selects rows. `fedplat.procedures.tables` is all
of that together, as procedures see it.
"""

from __future__ import annotations

from fedplat.tables.columns import BooleanColumn, CategoryColumn, Column, DateColumn, NumericColumn
from fedplat.tables.dictionary import (
    SiteCategories,
    SiteColumn,
    SiteDates,
    SiteNumbers,
    SiteTruthValues,
    TableDictionary,
    load_dictionary,
)
from fedplat.tables.files import CsvFile, DuckDBTable, Frame, ParquetFile
from fedplat.tables.sources import ColumnFrame, TableSource

__all__ = [
    "BooleanColumn",
    "CategoryColumn",
    "Column",
    "ColumnFrame",
    "CsvFile",
    "DateColumn",
    "DuckDBTable",
    "Frame",
    "NumericColumn",
    "ParquetFile",
    "SiteCategories",
    "SiteColumn",
    "SiteDates",
    "SiteNumbers",
    "SiteTruthValues",
    "TableDictionary",
    "TableSource",
    "load_dictionary",
]
