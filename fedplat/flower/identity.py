"""The identity of this process in Flower's terms: `Message(...)` of `flwr` 1.41 and later reads it from a class.

It is the only part of `flwr` outside of its public modules that is used. Older and newer versions may not have it.
"""

from __future__ import annotations

import contextlib

RUN_ID = 1
"""A process works for one run at a time; apps see this number as its id."""


def assume(node_id: int) -> None:
    """Let messages that this process creates come from a node."""
    with contextlib.suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, node_id, 1
