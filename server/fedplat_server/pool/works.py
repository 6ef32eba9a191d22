"""What ranks can do: every rank runs the same function, and sees the same messages in the same order.

A function that raises ends the ranks' group, since nobody knows then how far each of them has come: it is formed anew.
So what can be expected to go wrong on one rank only is agreed on (`Ranks.gather`), and told in the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from fedplat.backends.ranks import Ranks
from fedplat_server.pool import training
from fedplat_server.pool.aggregating import aggregate

Note: TypeAlias = Callable[[bytes], None]
"""Tells the daemon something before the work is done, and lets other works have their turn. All ranks have to call it,
though only the first one is heard. It does not return if the daemon does not want the work any more."""

Work: TypeAlias = Callable[[Ranks, bytes, Iterator[bytes], Note], bytes]
"""A work: the ranks, the request, the messages (which end when the daemon has no more) and notes; returns the reply."""


class Echo(msgspec.Struct, frozen=True):
    """The request, the messages and the result of `echo`."""

    texts: list[str]


def echo(ranks: Ranks, request: bytes, inbox: Iterator[bytes], note: Note) -> bytes:
    """Says what it was told, once all ranks have said the same: shows that a pool works."""
    parts = [msgspec.msgpack.decode(each, type=Echo) for each in (request, *inbox)]
    content = msgspec.msgpack.encode(Echo([text for part in parts for text in part.texts]))
    heard = ranks.gather(content)
    note(b"all ranks have answered")
    if any(each != content for each in heard):
        raise RuntimeError("the ranks were not told the same")
    return content


WORKS: Mapping[str, Work] = {
    "echo": echo,
    "aggregate": aggregate,
    "train": training.train,
    "evaluate": training.evaluate,
}
"""The works by name."""
