"""The clients of a job that fills buffers: a report that arrives when the buffer is full counts for the next one."""

from __future__ import annotations

from fedplat.simulation.protocols.base import ClientBehaviour


class BufferedBehaviour(ClientBehaviour):
    """Clients that train and report as for averaging, each at its own pace."""

    has_surplus = False
