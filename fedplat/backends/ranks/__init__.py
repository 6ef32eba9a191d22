"""Processes that work together on one thing (extra "torch"): a `torch.distributed` group, started by torchrun.

`group.py` is the group as the rest of fedplat sees it. NCCL carries tensors on GPUs, Gloo those on CPUs and all that
is small; the code is the same. `exchange.py` adds up vectors of many ranks: `layout.py` says who has which and who adds
up what, `shared.py` reads them out of the others' memory on one host, `sent.py` sends them.
"""

from __future__ import annotations

from fedplat.errors import MissingExtraError

try:
    from fedplat.backends.ranks.exchange import Way, vectors
    from fedplat.backends.ranks.group import COLLECTIVE_S, Backend, Ranks, joined, store_of_one_host
    from fedplat.backends.ranks.layout import Layout
    from fedplat.backends.ranks.vectors import Vectors
except ImportError as exc:
    raise MissingExtraError(
        "the server's own accelerators need PyTorch, which is not installed; install it with: "
        "pip install 'fedplat-server[pool]' (or 'fedplat[torch]')"
    ) from exc

__all__ = ["COLLECTIVE_S", "Backend", "Layout", "Ranks", "Vectors", "Way", "joined", "store_of_one_host", "vectors"]
