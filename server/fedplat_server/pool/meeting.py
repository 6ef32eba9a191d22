"""How torchrun finds the ranks together.

By default it meets over a key-value store that listens on every network of the host, for whoever comes, and unpickles
what it finds there. Ranks of one host meet over files in a folder of their own user instead; several hosts cannot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def on_one_host(folder: Path) -> dict[str, Any]:
    """Arguments of torchrun's `LaunchConfig` for one host; `folder` is private, and there as long as the ranks are."""
    _separate()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": str(folder / "rendezvous"),
        "rdzv_configs": {"store_type": "file"},
        "local_addr": "127.0.0.1",
    }


def over_network(endpoint: str, address: str) -> dict[str, Any]:
    """The same for several hosts, which meet at `endpoint` (HOST:PORT); this one is at `address`."""
    _separate()
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": endpoint,
        "rdzv_configs": {"timeout": 900},
        "local_addr": address,
    }


def _separate() -> None:
    # A key-value store of its own for each group: else a new one finds the addresses of the one before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
