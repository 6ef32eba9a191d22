"""Benchmark of a group of ranks: the library's collectives in all sizes, and the memory and links that carry them.

Every rank runs `measure.py`; `records.py` contains its plan, its report and the verdict.
`benchmarks/collectives/` compares other implementations with those of the library.
"""
