"""Packed data: examples in a few large files, for trainings that would otherwise open one small file per example.

A packed dataset is a folder of shards (`shard-00000.arrow`, ...) and an index (`index.json`). A shard is an Arrow IPC
file with one record batch and two columns, `inputs` and `targets`, of Arrow's canonical type `fixed_shape_tensor`, or
of plain numbers for scalars. It is not compressed, so a reader maps it into memory and copies only the rows of a batch.
Other programs (pyarrow, pandas, DuckDB) read the shards, too. Requires the extra `tables`.
"""

from fedplat.packed.index import ColumnType, PackedIndex, ShardFile
from fedplat.packed.reader import ArrayPair, PackedReader, PackedWriter

__all__ = ["ArrayPair", "ColumnType", "PackedIndex", "PackedReader", "PackedWriter", "ShardFile"]
