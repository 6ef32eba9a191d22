"""Processes that work together on one thing (extra "torch"): a `torch.distributed` group, started by torchrun.

`group.py` is the group as the rest of fedplat sees it. NCCL carries tensors on GPUs, Gloo those on CPUs and all that
is small; the code is the same.
"""

from __future__ import annotations

from fedplat.backends.ranks.group import COLLECTIVE_S, Backend, Ranks, joined

__all__ = ["COLLECTIVE_S", "Backend", "Ranks", "joined"]
