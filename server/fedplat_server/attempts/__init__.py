"""The backends that compute the aggregate of an attempt: the daemon's own process, or the ranks of the pool.

`inputs.py` has what both compute it from, `backend.py` what both offer; `local.py` and `pooled.py` are the two.
"""
