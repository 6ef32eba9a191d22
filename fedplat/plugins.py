"""The name under which release 0.1.0 documented `Plugins`; it goes with version 0.3."""

from __future__ import annotations

from fedplat.config.plugins import Plugins

__all__ = ["Plugins"]
