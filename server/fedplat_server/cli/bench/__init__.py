"""`fedplat-server pool bench`: whether a pool of this host is healthy, and how fast it is.

`command.py` reads the options, `launcher.py` starts the ranks, which `fedplat.pytorch.distributed.bench` has measure,
and `tables.py` and `picture.py` show the results.
"""
