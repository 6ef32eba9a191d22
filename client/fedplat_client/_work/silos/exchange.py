"""A silo's part in one round of a decentralised job: announce its model, and follow the server's instructions.

A poll of the server is always open, and tells when a phase is over. What takes long in a phase (models to get, a ring)
runs beside it, in a thread. Every result is durable before it is reported, so a silo that was restarted continues with
the server's next instruction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fedplat.errors import GossipError, ModelError, SecureAggregationError
from fedplat.gossip import steps
from fedplat.gossip.options import MIN_RING
from fedplat.gossip.ring import Ring, key_payload
from fedplat.gossip.steps import (
    AdoptMean,
    Announce,
    Broken,
    Completed,
    Contact,
    Exchanged,
    FetchModels,
    Leave,
    MixModels,
    Offered,
    OfferKey,
    Received,
    ReduceModels,
    SendKey,
    SiloMessage,
    Step,
    Wait,
)
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._auth.calls import Connection
from fedplat_client._state.keys import SigningKey
from fedplat_client._work.outcomes import AssignmentFailedError
from fedplat_client._work.silos.model import SiloModel
from fedplat_client._work.silos.network import Offer, PeerNetwork
from fedplat_client._work.silos.ring import BrokenRingError, RingRun
from fedplat_client.backoff import Backoff, retry
from fedplat_client.cancellation import Stop, StopSignal, read_stop
from fedplat_client.errors import CallRefusedError, Cancelled, ClientError, PeerError, ServerUnavailableError
from fedplat_client.task import Control

_FETCHES = 4
"""Models of neighbours that are fetched at a time."""
_MAX_METRICS = 98
"""The metrics of a training that are reported, besides the bytes of the exchange."""
_MIN_POLL_S = 0.1
"""A server that answers long polls at once would make a busy loop."""
_LAST_MEAN_S = 600.0
"""Time for getting a mean after the round is over."""
_PHASE_OVER = Stop(model_pb2.REASON_UNSPECIFIED, "the phase is over")
_WORK_DONE = Stop(model_pb2.REASON_UNSPECIFIED, "the work of the phase is done")
_logger = logging.getLogger(__name__)

PublishMean: TypeAlias = Callable[[str, Path, Sequence[Contact]], object]
"""Offers a mean, by its digest, to silos until the next one; also after the round."""


class RoundOverError(ClientError):
    """The server has ended the silo's part in the round; `stop` says why."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.text)
        self.stop = stop


@dataclass(frozen=True, kw_only=True)
class ModelExchange:
    """The exchange of one assignment. `address` is that of the silo's port, `export` stores the job's last mean.

    Methods raise `AssignmentFailedError`, `RoundOverError`, `Cancelled` or `OSError`.
    """

    connection: Connection
    assignment: fleet_pb2.Assignment
    control: Control
    model: SiloModel
    network: PeerNetwork
    key: SigningKey
    address: str
    min_ring: int
    publish_mean: PublishMean
    export: Callable[[Path], object]
    _keys: dict[int, KeyPair] = field(default_factory=dict[int, KeyPair])

    def catch_up(self) -> bool:
        """Do what is left of the last round: mix, or get the mean that was missed. Return False if all is done."""
        step, has_announced = self._ask(), False
        while True:
            match step.instruction:
                case MixModels():
                    step = self._mix(step.instruction)
                case AdoptMean() if has_announced or self.address:
                    step = self._work(step)
                case AdoptMean():  # for a mean through the server, its holders need this silo's key
                    step, has_announced = self._announce(), True
                case Leave():
                    return False
                case _:
                    return True

    def run(self) -> None:
        """Announce the model, and follow the server's instructions until the round is over."""
        step = self._announce()
        while True:
            match step.instruction:
                case Leave():
                    return
                case MixModels():
                    step = self._mix(step.instruction)
                case SendKey():
                    step = self._offer_key(step.instruction)
                case _:
                    step = self._work(step)

    # --- short steps -----------------------------------------------------------------------------------------

    def _announce(self) -> Step:
        model, assignment = self.model, self.assignment
        model.count_bytes(*self.network.counter.take())
        model.prepare(assignment.round, np.random.default_rng(self.control.options.rng.getrandbits(128)))
        sent, received = model.state.round_bytes
        metrics = dict(list(model.state.metrics.items())[:_MAX_METRICS])
        metrics |= {"sent_bytes": float(sent), "received_bytes": float(received)}
        return self._ask(Announce(model.describe(self.address, self.network.own.key), metrics))

    def _mix(self, instruction: MixModels) -> Step:
        if not self.model.mix(instruction.row):
            _logger.warning("The models of neighbours are lost, and the silo's model stays as it is.")
        return self._ask()

    def _offer_key(self, instruction: SendKey) -> Step:
        """Offer a fresh key; a mean of an earlier attempt of the round is reported first, since it may stand."""
        assignment, attempt, mean = self.assignment, instruction.attempt, self.model.state.mean
        if attempt not in self._keys:
            self._keys[attempt] = KeyPair.draw(os.urandom)
            if mean is not None and mean.round == assignment.round:
                done = Completed(mean.attempt, mean.digest, mean.squared_distance, mean.chunks)
                return self._ask(done)
        public = self._keys[attempt].public
        own = self.network.own.client_id
        payload = key_payload(assignment.job_id, assignment.round, attempt, own, public)
        return self._ask(OfferKey(attempt, public, self.key.sign(payload), self.model.largest()))

    # --- phases ----------------------------------------------------------------------------------------------

    def _work(self, step: Step) -> Step:
        """Serve other silos and do what a step says until the phase is over; return the next step."""
        phase = Control(step.remaining_s or _LAST_MEAN_S, options=self.control.options)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_follow(self.control.signal, phase.signal))
            stack.enter_context(self.network.serve(self._list_offers(step), phase))
            stack.callback(phase.signal.set, _PHASE_OVER)
            work: Future[None] | None = None
            if (task := self._find_task(step, phase)) is not None:
                executor = stack.enter_context(ThreadPoolExecutor(1, "fedplat-exchange"))
                stack.callback(phase.signal.set, _PHASE_OVER)  # before the thread is waited for
                work = executor.submit(task)
            return self._poll(step, work)

    def _find_task(self, step: Step, phase: Control) -> Callable[[], None] | None:
        match step.instruction:
            case FetchModels(models=models):
                return lambda: self._fetch_models(models, phase)
            case ReduceModels() as reduce:
                return lambda: self._reduce(reduce, phase)
            case AdoptMean() as mean:
                return lambda: self._adopt(mean, phase)
            case _:
                return None

    def _poll(self, step: Step, work: Future[None] | None) -> Step:
        """Return the server's next step, once the phase is over or there is something else to do."""
        control = self.control
        while True:
            done, began = StopSignal(), control.options.clock()
            if work is not None:
                work.add_done_callback(lambda _, done=done: done.set(_WORK_DONE))
            try:
                with _follow(control.signal, done):
                    following = self._ask(known=step.known, wait_s=control.options.check_in_wait_s, signal=done)
            except Cancelled:
                control.signal.check()
                assert work is not None
                work.result()
                work = None
                if isinstance(step.instruction, AdoptMean):
                    return self._ask()
                continue
            is_same = isinstance(following.instruction, Wait | type(step.instruction))
            if following.known != step.known or not is_same:
                return following
            if (early_s := began + _MIN_POLL_S - control.options.clock()) > 0:
                control.wait(early_s)

    def _list_offers(self, step: Step) -> Generator[Offer]:
        """Yield the files that other silos may have; a mean is for those that ask for it through the server."""
        for digest, receivers in self.model.list_files(step.model_receivers):
            if receivers:
                yield Offer(digest, self.model.path(digest), receivers)
        if not (mean := self.model.adopted_mean()):
            return
        path = self.model.path(mean)
        if self.network.listener is not None:
            self.publish_mean(mean, path, step.mean_receivers)
        else:
            yield Offer(mean, path, [each for each in step.mean_receivers if each.relay_key])

    # --- models of neighbours --------------------------------------------------------------------------------

    def _fetch_models(self, models: Sequence[Offered], phase: Control) -> None:
        with ThreadPoolExecutor(min(_FETCHES, len(models)), "fedplat-fetch") as executor:
            fetches = {executor.submit(self._fetch, model, phase): model for model in models}
            for fetch in as_completed(fetches):
                self._store(fetches[fetch], fetch, phase)

    def _store(self, offered: Offered, fetch: Future[Path], phase: Control) -> None:
        """Store a neighbour's model, or give it up for this round, and report it."""
        name = offered.contact.silo
        try:
            away = self.model.store(name, offered.digest, fetch.result())
        except (PeerError, GossipError, ModelError) as exc:
            _logger.warning("A neighbour's model is missed: %s", exc, extra={"peer": name})
            self._ask(Exchanged(missed=(name,)), signal=phase.signal)
        else:
            self._ask(Exchanged((Received(name, offered.digest, away),)), signal=phase.signal)

    def _fetch(self, offered: Offered, phase: Control) -> Path:
        model, delta, contact = self.model, offered.delta, offered.contact
        if (path := model.find(offered.digest)) is not None:
            return path
        if delta is not None and delta.size_bytes <= model.file_bytes and model.find(delta.base) is not None:
            payload = self.network.fetch(contact, delta.digest, delta.size_bytes, phase)
            try:
                return model.rebuild(offered, payload)
            finally:
                payload.unlink(missing_ok=True)
        if offered.size_bytes != model.file_bytes:
            raise GossipError(f"the file has {offered.size_bytes} bytes; expected {model.file_bytes}")
        return self.network.fetch(contact, offered.digest, offered.size_bytes, phase)

    # --- rings and means -------------------------------------------------------------------------------------

    def _reduce(self, instruction: ReduceModels, phase: Control) -> None:
        """Take part in a ring, and report the mean, or why there is none."""
        begun, mean = instruction.ring, self.model.state.mean
        own = self.network.own.client_id
        if mean is not None and (mean.round, mean.attempt) == (begun.round, begun.attempt):
            self._report_mean(phase)
            return
        key = self._keys.pop(begun.attempt, None)
        if key is None:  # the client was restarted; keys are in its memory only
            self._ask(Broken(begun.attempt, own, 0), signal=phase.signal)
            return
        ring = Ring(
            job_id=self.assignment.job_id,
            round=begun.round,
            attempt=begun.attempt,
            members=begun.members,
            bound=begun.bound,
            size=self.model.size,
        )
        try:
            _check_size(ring, self.min_ring)
            run = RingRun(ring, instruction.contacts, key, self.model.vector(), self.network)
            with run.run(phase):
                self.model.take_mean(run.member.mean(), begun.round, begun.attempt, run.member.chunk_digests())
                self._report_mean(phase)
                phase.signal.wait(phase.remaining_s)
        except BrokenRingError as exc:
            _logger.warning("The ring is broken: %s", exc, extra={"peer": exc.sender})
            self._ask(Broken(begun.attempt, exc.sender, exc.step), signal=phase.signal)
        except SecureAggregationError as exc:
            raise AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, str(exc)) from exc
        except GossipError as exc:
            raise AssignmentFailedError(model_pb2.REASON_TRAINER_ERROR, str(exc)) from exc

    def _report_mean(self, phase: Control) -> None:
        mean = self.model.state.mean
        assert mean is not None
        self._ask(Completed(mean.attempt, mean.digest, mean.squared_distance, mean.chunks), signal=phase.signal)

    def _adopt(self, instruction: AdoptMean, phase: Control) -> None:
        """Replace the model by a mean, which another silo may have to send."""
        digest, pending = instruction.digest, self.model.state.mean
        path = self.model.find(digest) if pending is not None and pending.digest == digest else None
        if path is None:
            path = self._fetch_mean(instruction, phase)
        self.model.adopt(path, digest, instruction.round)
        if instruction.is_last:
            self.export(self.model.path(digest))

    def _fetch_mean(self, instruction: AdoptMean, phase: Control) -> Path:
        """Get a mean from one of the silos that have it, as soon as one can send it."""
        backoff, holders = Backoff(phase.options), list(instruction.holders)
        random.shuffle(holders)
        while True:
            for holder in holders:
                try:
                    path = self.network.fetch(holder, instruction.digest, self.model.mean_bytes, phase)
                    self.model.check_mean(path)
                except (PeerError, GossipError, ModelError) as exc:
                    _logger.debug("%s sends no mean: %s", holder.silo, exc)
                else:
                    return path
            if phase.remaining_s <= 0:
                text = f"no silo could send the mean of round {instruction.round} in time"
                raise RoundOverError(Stop(model_pb2.REASON_TRANSFER_FAILED, text))
            phase.wait(max(backoff.next_s(), _MIN_POLL_S))

    # --- the server ------------------------------------------------------------------------------------------

    def _ask(
        self,
        message: SiloMessage | None = None,
        *,
        known: str = "",
        wait_s: float = 0.0,
        signal: StopSignal | None = None,
    ) -> Step:
        """Report something, if anything, and return what to do; within `wait_s` only if `known` is not true any more.

        Wait for a server that cannot be reached.
        """
        options, state = self.control.options, self.model.state
        request = fleet_pb2.ExchangeStepRequest(
            token=self.assignment.token,
            wait_s=wait_s,
            mixed_round=state.mixed_round,
            adopted_round=state.adopted_round,
            message=b"" if message is None else steps.encode(message),
            known=known,
        )
        used = signal or self.control.signal
        try:
            response = retry(lambda: self.connection.exchange_step(request, used), options, used)
        except ServerUnavailableError:
            used.check()  # only the signal ends the retries
            raise
        except CallRefusedError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the server refuses a step of the exchange: {exc}"
            ) from exc
        if response.HasField("refusal"):
            raise RoundOverError(read_stop(response.refusal))
        try:
            return steps.decode_step(response.step)
        except GossipError as exc:
            raise AssignmentFailedError(model_pb2.REASON_TRANSFER_FAILED, f"the server's answer: {exc}") from exc


def _check_size(ring: Ring, minimum: int) -> None:
    """Raise `SecureAggregationError` for a ring of so few silos that its mean would reveal their models."""
    number, expected = sum(member.share > 0.0 for member in ring.members), max(minimum, MIN_RING)
    if number < expected:
        raise SecureAggregationError(
            f"the ring has {number} models; the owner of this client requires at least {expected}: raise "
            "minimum_fraction or the goal in [selection]"
        )


def _follow(first: StopSignal, second: StopSignal) -> contextlib.AbstractContextManager[None]:
    """Set the second signal if the first one is set within the block."""
    return first.attach(lambda: second.set(first.stop or _PHASE_OVER))
