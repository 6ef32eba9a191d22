"""Groups of processes (extra "torch"): a `torch.distributed` group, started by torchrun, mpirun or srun.

`launchers.py` reads what the launcher has set, and `group.py` is the group's interface to the rest of fedplat, also
for long work of some ranks. NCCL carries tensors on GPUs, Gloo those on CPUs and all small messages; the code is the
same. `vectors.py` adds up vectors of many ranks, whose columns it assigns to processes: `shared_memory.py` reads the
other processes' vectors on one host, `exchange.py` sends them between pairs.
"""

from __future__ import annotations

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command

try:
    from fedplat.pytorch.distributed.exchange import Transport, make_vectors
    from fedplat.pytorch.distributed.group import (
        COLLECTIVE_S,
        STEP_BYTES,
        Backend,
        Ranks,
        check_mpi,
        join_group,
        make_file_store,
        work_in_steps,
    )
    from fedplat.pytorch.distributed.launchers import LaunchedRank, find_rank, open_store
    from fedplat.pytorch.distributed.vectors import VectorLayout, Vectors
except ImportError as exc:
    raise MissingExtraError(
        "the server's own accelerators need PyTorch, which is not installed; install it with: "
        + install_command("torch")
    ) from exc

__all__ = [
    "COLLECTIVE_S",
    "STEP_BYTES",
    "Backend",
    "LaunchedRank",
    "Ranks",
    "Transport",
    "VectorLayout",
    "Vectors",
    "check_mpi",
    "find_rank",
    "join_group",
    "make_file_store",
    "make_vectors",
    "open_store",
    "work_in_steps",
]
