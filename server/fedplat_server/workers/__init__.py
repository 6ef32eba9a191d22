"""The worker pool: ranks, processes that run tasks for the daemon on the server's own accelerators.

`fedplat-server pool run` (`launcher.py`) starts the ranks (`rank.py`) with torchrun. The daemon (`client.py`) calls
rank 0 over a Unix socket in the data folder (`protocol.py`), and rank 0 broadcasts each step to the others
(`broadcast.py`). `tasks/` has the tasks. Only ranks import PyTorch.
"""
