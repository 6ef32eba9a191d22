"""How fast a group of ranks is: collectives of all sizes, beside the memory and the links that carry them.

`measuring.py` runs on every rank; `records.py` has what it takes and what it tells, `ways.py` the table of what is
compared, `health.py` the verdict.
"""
