"""What rank 0 tells the other ranks: the same events for all of them, in one order, through torchrun's key-value store.

A collective would do it too, but one that waits has a time limit, and a pool may have nothing to do for days.
"""

from __future__ import annotations

import datetime
import os
import secrets
from typing import Any, Literal, TypeVar

import msgspec
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fedplat.backends.ranks import Backend, Ranks
from fedplat_server.pool import keys
from fedplat_server.pool.frames import Refused

# The store's client complains to the log whenever a wait has been in vain. If the store itself goes, it fails at once.
_WAIT = datetime.timedelta(days=1)
_FAILED = "failed"
_R = TypeVar("_R", bound=msgspec.Struct)


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

    def __init__(self, ranks: Ranks, key: bytes) -> None:
        """`key` proves what each says (`keys.py`); a rank alone needs none."""
        # Whatever an earlier group of the same torchrun has left there is none of ours.
        self._name = ranks.told(secrets.token_bytes(8)).hex()
        self._secret = key
        self._others = ranks.size - 1
        self._count = 0
        self._store = self._connected() if self._others else None

    def publish(self, event: Event) -> None:
        """Tells the other ranks; for rank 0."""
        if self._store is not None:
            self._put(self._store, self._key(), event)
        self._count += 1

    def next(self) -> Event:
        """Waits for the next event; for the others.

        Raises an error of PyTorch when the store is gone, and `PermissionError` for an event that is not rank 0's.
        """
        assert self._store is not None
        key = self._key()
        _wait(self._store, key)
        event = self._got(self._store, key, Event)
        if self._store.add(f"read {key}", 1) == self._others:  # the last one to read it tidies up
            self._store.delete_key(key)
            self._store.delete_key(f"read {key}")
        self._count += 1
        return event

    def tell_failure(self, failure: Refused) -> None:
        """Tells rank 0 why this rank fails."""
        if self._store is not None:
            self._put(self._store, _FAILED, failure)

    def wait_for_failure(self) -> Refused:
        """Returns when another rank fails, why."""
        store = self._connected()  # one of its own: whoever waits holds a connection up
        _wait(store, _FAILED)
        return self._got(store, _FAILED, Refused)

    def _put(self, store: Store, key: str, record: msgspec.Struct) -> None:
        content: Any = keys.signed(self._secret, f"{self._name} {key}", msgspec.msgpack.encode(record))
        store.set(key, content)

    def _got(self, store: Store, key: str, kind: type[_R]) -> _R:
        return msgspec.msgpack.decode(keys.checked(self._secret, f"{self._name} {key}", store.get(key)), type=kind)

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
