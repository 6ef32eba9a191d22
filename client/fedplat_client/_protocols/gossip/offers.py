"""What a silo lets others have: files that it offers at its port, or sends through the server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from fedplat.gossip.steps import Contact
from fedplat.wire.v1 import model_pb2
from fedplat_client._protocols.gossip.network import ByteCounter, PeerNetwork
from fedplat_client._work.peers.listener import PeerListener
from fedplat_client.cancellation import Stop
from fedplat_client.errors import CallError, Cancelled, TransferError
from fedplat_client.options import ClientOptions
from fedplat_client.task import Control

_SENDERS = 1
"""Models, and means, that are sent through the server at a time: with one file that is received, fewer streams than it
allows."""
_NOT_WANTED = Stop(model_pb2.REASON_UNSPECIFIED, "the file is not wanted any more")
_logger = logging.getLogger(__name__)


class Delivery(NamedTuple):
    """A file for another silo."""

    receiver: Contact
    digest: str
    path: Path

    @property
    def key(self) -> tuple[str, str]:
        """The receiver and the file, which identify it."""
        return self.receiver.silo, self.digest


class Offers(Protocol):
    """The files that other silos may have now."""

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Replace the files: begin with new ones, and end those that are not there any more."""
        ...

    def close(self) -> None:
        """End all."""
        ...


class PortOffers:
    """Files that the silo offers at its port."""

    def __init__(self, listener: PeerListener, counter: ByteCounter) -> None:
        self._listener = listener
        self._counter = counter
        self._open: dict[tuple[str, str], contextlib.ExitStack] = {}

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Replace the files that are offered."""
        wanted = {each.key: each for each in deliveries}
        for key in self._open.keys() - wanted.keys():
            self._open.pop(key).close()
        for key in wanted.keys() - self._open.keys():
            receiver, digest, path = wanted[key]
            stack = self._open[key] = contextlib.ExitStack()
            offer = self._listener.offer(
                digest, path, [receiver.silo], on_sent=lambda number: self._counter.add(sent=number)
            )
            stack.enter_context(offer)

    def close(self) -> None:
        """Offer nothing any more."""
        self.update(())


class RelayOffers:
    """Files that the silo sends through the server in one assignment, each once."""

    def __init__(self, network: PeerNetwork, options: ClientOptions) -> None:
        self._network = network
        self._options = options
        self._executor = ThreadPoolExecutor(_SENDERS, "fedplat-relay")
        self._begun: dict[tuple[str, str], Control] = {}

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Send files that were not sent before, and stop to send others."""
        wanted = {each.key: each for each in deliveries}
        for key in self._begun.keys() - wanted.keys():
            self._begun.pop(key).signal.set(_NOT_WANTED)
        for key in wanted.keys() - self._begun.keys():
            control = self._begun[key] = Control(options=self._options)
            self._executor.submit(self._send, wanted[key], control)

    def close(self) -> None:
        """Stop to send files, and end the threads."""
        self.update(())
        self._executor.shutdown(cancel_futures=True)

    def _send(self, delivery: Delivery, control: Control) -> None:
        """Send a file; if that fails, the receiver does without it."""
        try:
            self._network.send(delivery.receiver, delivery.digest, delivery.path, control)
        except Cancelled:
            pass
        except (TransferError, CallError, OSError) as exc:
            if not control.signal.is_set():
                fields = {"peer": delivery.receiver.silo}
                _logger.warning("A file could not be sent to another silo: %s", exc, extra=fields)
