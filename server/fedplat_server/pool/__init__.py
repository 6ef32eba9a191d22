"""The pool: ranks that work for the daemon, on the server's own accelerators.

`fedplat-server pool run` (`launch.py`) has torchrun start the ranks (`rank.py`). The daemon speaks to rank 0 over a
Unix socket in the data folder (`link.py`; `frames.py` is what travels), and rank 0 tells the others. What they can do
is the table in `works.py`. Only ranks import PyTorch.
"""
