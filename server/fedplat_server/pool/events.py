"""What rank 0 tells the other ranks: the same events for all of them, in one order, through torchrun's key-value store.

A collective would do it too, but one that waits has a time limit, and a pool may have nothing to do for days.
"""

from __future__ import annotations

import datetime
import os
import secrets
from typing import Literal

import msgspec
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fedplat.backends.ranks import Backend, Ranks
from fedplat_server.pool.frames import Refused

# The store's client complains to the log whenever a wait has been in vain. If the store itself goes, so does torchrun,
# and with it this process.
_WAIT = datetime.timedelta(days=1)
_FAILED = "failed"


class Event(msgspec.Struct, frozen=True):
    """Something of one work.

    It begins (its name, the request, what carries tensors), gets a message, gets no more of them, goes on, or is not
    wanted any more.
    """

    work: int
    kind: Literal["begin", "message", "end", "resume", "cancel"]
    content: bytes = b""
    name: str = ""
    backend: Backend = "auto"


class Events:
    """The events of the present group; each rank makes it at the same time."""

    def __init__(self, ranks: Ranks) -> None:
        # Whatever an earlier group of the same torchrun has left there is none of ours.
        self._name = ranks.told(secrets.token_bytes(8)).hex()
        self._others = ranks.size - 1
        self._count = 0
        self._store = self._connected() if self._others else None

    def publish(self, event: Event) -> None:
        """Tells the other ranks; for rank 0."""
        if self._store is not None:
            self._store.set(self._key(), msgspec.msgpack.encode(event))  # pyright: ignore[reportArgumentType]
        self._count += 1

    def next(self) -> Event:
        """Waits for the next event; for the others. Raises an error of PyTorch when the store is gone."""
        assert self._store is not None
        key = self._key()
        _wait(self._store, key)
        content = self._store.get(key)
        if self._store.add(f"read {key}", 1) == self._others:  # the last one to read it tidies up
            self._store.delete_key(key)
            self._store.delete_key(f"read {key}")
        self._count += 1
        return msgspec.msgpack.decode(content, type=Event)

    def tell_failure(self, failure: Refused) -> None:
        """Tells rank 0 why this rank fails."""
        if self._store is not None:
            self._store.set(_FAILED, msgspec.msgpack.encode(failure))  # pyright: ignore[reportArgumentType]

    def wait_for_failure(self) -> Refused:
        """Returns when another rank fails, why."""
        store = self._connected()  # one of its own: whoever waits holds a connection up
        _wait(store, _FAILED)
        return msgspec.msgpack.decode(store.get(_FAILED), type=Refused)

    def _connected(self) -> Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return PrefixStore(f"fedplat {self._name}", TCPStore(host, port, is_master=False))

    def _key(self) -> str:
        return str(self._count)


def _wait(store: Store, key: str) -> None:
    while True:
        try:
            return store.wait([key], _WAIT)
        except DistStoreError:
            continue
