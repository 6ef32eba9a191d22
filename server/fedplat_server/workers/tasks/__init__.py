"""What the ranks can do: every rank runs the same function, and gets the same messages in the same order.

A function that raises ends the group, since the ranks may then be at different places; it is formed again. So a failure
that can be expected on one rank alone is agreed on (`Ranks.all_gather`), and returned in the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from fedplat.pytorch.distributed import Ranks
from fedplat_server.workers.tasks import train
from fedplat_server.workers.tasks.aggregate import aggregate

Note: TypeAlias = Callable[[bytes], None]
"""Sends the daemon a note before the task is done, and lets other tasks run. All ranks have to call it, though only
rank 0's is sent. It does not return if the task was cancelled."""

TaskFunction: TypeAlias = Callable[[Ranks, bytes, Iterator[bytes], Note], bytes]
"""A task: gets the ranks, the request, the messages (until the daemon has no more) and notes; returns the reply."""


class Echo(msgspec.Struct, frozen=True):
    """The request, the messages and the result of `echo`."""

    texts: list[str]


def echo(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Return the request and the messages after checking that every rank got the same bytes (a health check)."""
    parts = [msgspec.msgpack.decode(each, type=Echo) for each in (request, *messages)]
    content = msgspec.msgpack.encode(Echo([text for part in parts for text in part.texts]))
    contents = ranks.all_gather(content)
    note(b"all ranks have answered")
    if any(each != content for each in contents):
        raise RuntimeError("the ranks got different messages")
    return content


TASKS: Mapping[str, TaskFunction] = {
    "echo": echo,
    "aggregate": aggregate,
    "train": train.train,
    "evaluate": train.evaluate,
}
"""The tasks by name."""
