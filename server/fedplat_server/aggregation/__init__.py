"""The backends that compute the aggregate of an attempt: the daemon's own process, or the ranks of the pool.

`backend.py` has what both offer, `local.py` and `pooled.py` are the two, and `service.py` runs them for the jobs.
`fedplat_server.workers.attempt_inputs` has what both compute from.
"""
