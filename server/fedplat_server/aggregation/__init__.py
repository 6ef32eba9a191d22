"""The backends that compute the aggregate of an attempt: the daemon's own process, or the ranks of the worker pool.

`backend.py` defines their interface and implements it, in threads and on ranks, and `service.py` runs them for the
jobs. Their inputs are in `fedplat_server.workers.task_inputs`.
"""
