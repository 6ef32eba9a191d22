"""The core of fedplat: models, job files, the pure coordinator and the aggregation algebra."""

import os

# gRPC reads this once, at its import. Its handlers for forks start threads in a child that was forked while a call ran,
# and abort it: a worker of a simulation, or of a DataLoader. No such child uses the gRPC of its parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC's C library would write its own lines to stderr for each failed connection, besides our errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.2.0.dev0"
