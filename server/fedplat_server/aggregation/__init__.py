"""The backends that compute the aggregate of an attempt: the daemon's own process, or the ranks of the worker pool.

`backend.py` defines their interface, `local.py` and `pooled.py` implement it, and `service.py` runs them for the jobs.
Their inputs are in `fedplat_server.workers.task_inputs`.
"""
