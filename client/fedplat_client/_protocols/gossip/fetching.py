"""Gets the models of a silo's neighbours: several at a time from their ports, and one at a time through the server."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fedplat.errors import GossipError
from fedplat.gossip.steps import Offered
from fedplat.wire.v1 import model_pb2
from fedplat_client import cancellation, errors, task
from fedplat_client._protocols.gossip.model import SiloModel
from fedplat_client._protocols.gossip.network import PeerNetwork, RemoteFile

_FETCHES = 4
"""Models that are fetched from ports at a time."""
_RELAY_WAIT_S = 10.0
"""How long one call waits for the only file that is missing; with several, they take turns each second."""
_RELAY_TURN_S = 1.0
_ERRORS = (errors.TransferError, errors.CallError, GossipError, OSError)
_NOT_WANTED = cancellation.Stop(model_pb2.REASON_UNSPECIFIED, "the models are not wanted any more")
_logger = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A neighbour's model: the path of its verified file, or None if the silo cannot get it."""

    offered: Offered
    path: Path | None


def fetch_models(
    models: Collection[Offered], model: SiloModel, network: PeerNetwork, phase: task.Control
) -> Generator[Fetched]:
    """Yield each model as soon as it is there or cannot be got; end when the signal of the phase is set."""
    found: queue.SimpleQueue[Fetched | None] = queue.SimpleQueue()
    run = _Fetching(model, network, phase, found.put)
    missing = [each for each in models if not run.try_stored(each)]
    jobs: list[Callable[[], None]] = [lambda each=each: run.fetch(each) for each in missing if each.contact.address]
    if relayed := [each for each in missing if not each.contact.address]:
        jobs.append(lambda: run.receive_all(relayed))

    def work(job: Callable[[], None]) -> None:
        try:
            job()
        except errors.Cancelled:
            pass
        finally:
            found.put(None)

    with ThreadPoolExecutor(_FETCHES + 1, "fedplat-models") as executor:
        futures = [executor.submit(work, job) for job in reversed(jobs)]  # the one for the relay takes longest
        num_ended = 0
        try:
            while num_ended < len(futures) or not found.empty():
                if (each := found.get()) is None:
                    num_ended += 1
                else:
                    yield each
        except GeneratorExit:
            phase.signal.set(_NOT_WANTED)  # else the threads would continue
            raise
        for future in futures:
            future.result()


class _Fetching:
    """Fetches in threads; `put` gets what comes of it."""

    def __init__(
        self, model: SiloModel, network: PeerNetwork, phase: task.Control, put: Callable[[Fetched], object]
    ) -> None:
        self._model = model
        self._network = network
        self._phase = phase
        self._put = put

    def try_stored(self, offered: Offered) -> bool:
        """Return whether the silo has a model already, or must not get it."""
        path = self._model.find(offered.digest)
        if path is None and offered.size_bytes == self._model.file_bytes:
            return False
        if path is None:
            text = f"the file has {offered.size_bytes} bytes; expected {self._model.file_bytes}"
            self._miss(offered, errors.PeerError("WRONG_SIZE", text))
        else:
            self._put(Fetched(offered, path))
        return True

    def fetch(self, offered: Offered) -> None:
        """Fetch a model from the neighbour's port: the step to it, or the whole file."""
        contact, phase = offered.contact, self._phase
        if self._model.can_follow(offered):
            try:
                path = self._network.fetch(contact, _step_of(offered), phase)
                self._put(Fetched(offered, self._model.follow(offered, path)))
                return
            except _ERRORS as exc:
                _log("The whole file of a neighbour is fetched, since the step to it is of no use", offered, exc)
        try:
            self._put(Fetched(offered, self._network.fetch(contact, _whole_of(offered), phase)))
        except _ERRORS as exc:
            self._miss(offered, exc)

    def receive_all(self, models: Collection[Offered]) -> None:
        """Receive models through the server, in turns, because a neighbour may not have sent its one yet."""
        waiting = deque((each, _list_files(each, self._model)) for each in models)
        while waiting:
            offered, files = waiting.popleft()
            is_last = not waiting and len(files) == 1
            try:
                for remote in files:
                    if (path := self._receive(offered, remote, is_last=is_last)) is not None:
                        self._put(Fetched(offered, path))
                        break
                else:
                    waiting.append((offered, files))
            except _ERRORS as exc:
                if files[1:]:  # the step was of no use
                    waiting.append((offered, files[1:]))
                else:
                    self._miss(offered, exc)

    def _receive(self, offered: Offered, remote: RemoteFile, *, is_last: bool) -> Path | None:
        """Return the path of a file; None if the neighbour has not sent it yet."""
        wait_s, phase = _RELAY_WAIT_S if is_last else _RELAY_TURN_S, self._phase
        try:
            path = self._network.receive(offered.contact, remote, wait_s, phase)
        except errors.NotSentYetError as exc:
            if phase.remaining_s <= 0:
                raise errors.PeerError("TIMEOUT", "the file did not come through the server in time") from exc
            return None
        return path if remote.digest == offered.digest else self._model.follow(offered, path)

    def _miss(self, offered: Offered, exc: Exception) -> None:
        if not self._phase.signal.is_set():
            _log("The model of a neighbour is missed", offered, exc)
        self._put(Fetched(offered, None))


def _list_files(offered: Offered, model: SiloModel) -> list[RemoteFile]:
    """Return the files of which one is enough: the step first, which is smaller."""
    return [*([_step_of(offered)] if model.can_follow(offered) else []), _whole_of(offered)]


def _step_of(offered: Offered) -> RemoteFile:
    assert offered.delta is not None
    return RemoteFile(offered.delta.digest, offered.delta.size_bytes)


def _whole_of(offered: Offered) -> RemoteFile:
    return RemoteFile(offered.digest, offered.size_bytes)


def _log(sentence: str, offered: Offered, exc: Exception) -> None:
    _logger.warning("%s: %s", sentence, exc, extra={"peer": offered.contact.silo})
