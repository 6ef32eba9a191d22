"""The identities of runs and nodes in Flower's terms.

`Message(...)` of `flwr` 1.41 and later reads that of its process from a class. It is the only part of `flwr` outside of
its public modules that is used. Older and newer versions may not have it.
"""

from __future__ import annotations

import contextlib
from hashlib import sha256

RUN_ID = 1
"""A process works for one run at a time; apps see this number as its id."""
SERVER_NODE_ID = 1
"""The node id from which clients receive messages, as in Flower."""


def assume(node_id: int) -> None:
    """Let messages that this process creates come from a node."""
    with contextlib.suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, node_id, 1


def node_id(name: str) -> int:
    """Return the node id that apps see for a client: 63 bits of a hash."""
    return int.from_bytes(sha256(name.encode(errors="surrogateescape")).digest()[:8], "big") >> 1
