"""`fedplat-server pool bench`: check the health and measure the speed of a worker pool on this host.

`command.py` reads the options, `launcher.py` starts the ranks, which run `fedplat.pytorch.distributed.bench`,
and `tables.py` shows the results.
"""
