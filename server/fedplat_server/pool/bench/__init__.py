"""`fedplat-server pool bench`: whether a pool of this host is healthy, and how fast.

`command.py` reads the options and starts the ranks (`launch.py`), `tables.py` and `picture.py` show what they measured,
which `fedplat.backends.ranks.bench` does.
"""
