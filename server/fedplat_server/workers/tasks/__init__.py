"""The tasks of the ranks: every rank runs the same function on the same messages in the same order.

A function that raises ends the group, since the ranks may then be at different steps; torchrun restarts it. So ranks
exchange failures that may occur on one rank only (`Ranks.all_gather`), and return them in the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.pytorch.distributed import Ranks
from fedplat_server.workers.tasks import train
from fedplat_server.workers.tasks.aggregate import aggregate

Note: TypeAlias = Callable[[bytes], None]
"""Sends the daemon a note before the task is done, and lets other tasks run. All ranks must call it, though only the
note of rank 0 is sent. It raises `TaskCancelledError` if the task was cancelled."""

TaskFunction: TypeAlias = Callable[[Ranks, bytes, Iterator[bytes], Note], bytes]
"""A task: a function of the ranks, the request, the messages (ends after the last) and `Note`; returns the reply."""


class Echo(msgspec.Struct, frozen=True):
    """The request, the messages and the result of `echo`."""

    texts: list[str]


def echo(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Return the request and the messages after checking that every rank got the same bytes (a health check)."""
    received = [msgspec.msgpack.decode(message, type=prepare_type(Echo)) for message in (request, *messages)]
    reply = msgspec.msgpack.encode(Echo([text for echo in received for text in echo.texts]))
    replies = ranks.all_gather(reply)
    note(b"all ranks have answered")
    if any(other != reply for other in replies):
        raise RuntimeError("the ranks received different messages")
    return reply


TASKS: Mapping[str, TaskFunction] = {
    "echo": echo,
    "aggregate": aggregate,
    "train": train.train,
    "evaluate": train.evaluate,
    "train in a layout": train.train,
    "evaluate in a layout": train.evaluate,
}
"""The tasks by name. Those in a layout have names of their own: ranks of an older release would ignore the layout."""
