"""The configuration with which torchrun starts ranks and they find each other, for a pool and for benchmarks.

By default torchrun's agents meet at a key-value store that listens on all networks of the host and unpickles the data
that it receives. Ranks of one host meet over files in a folder of their own user instead; several hosts cannot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = [
    "ChildFailedError",
    "RendezvousError",
    "SignalException",
    "elastic_launch",
    "make_config",
    "meet_on_one_host",
    "meet_over_network",
]


def make_config(
    num_ranks: int, rendezvous: dict[str, Any], hosts: tuple[int, int] = (1, 1), max_restarts: int = 0
) -> LaunchConfig:
    """Return torchrun's configuration for `num_ranks` ranks on this host, of a group of MIN to MAX hosts."""
    # Give each group its own key-value store: in a shared one, a new group finds the addresses of the previous one.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return LaunchConfig(
        min_nodes=hosts[0],
        max_nodes=hosts[1],
        nproc_per_node=num_ranks,
        run_id="fedplat",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
        **rendezvous,
    )


def meet_on_one_host(folder: Path) -> dict[str, Any]:
    """Return the rendezvous settings for one host; `folder` must be private, and exist as long as the ranks run."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": str(folder / "rendezvous"),
        "rdzv_configs": {"store_type": "file"},
        "local_addr": "127.0.0.1",
    }


def meet_over_network(endpoint: str, address: str) -> dict[str, Any]:
    """Return the rendezvous settings for several hosts: meet at `endpoint` (HOST:PORT), reach this one at `address`."""
    return {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint, "rdzv_configs": {"timeout": 900}, "local_addr": address}
