"""One silo's part in one round: it announces its model, and does what the server's steps say until it may leave."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedplat import claims, errors
from fedplat.gossip import messages, steps
from fedplat.gossip.ring import key_payload
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.wire.v1 import model_pb2
from fedplat_client._protocols.gossip.calls import PhaseWatch, SiloCalls, limit_time
from fedplat_client._protocols.gossip.fetching import BrokenRingError, Fetched, RingRun, fetch_models
from fedplat_client._protocols.gossip.model import SiloModel
from fedplat_client._protocols.gossip.network import Delivery, Offers, PeerNetwork, RemoteFile
from fedplat_client._state.released import Protection, ReleasedItem
from fedplat_client._state.silo_store import PendingMean
from fedplat_client._work.heartbeat import AssignmentFailedError
from fedplat_client.backoff import Backoff
from fedplat_client.errors import CallError, Cancelled, NotSentYetError, PeerError, TransferError

_MEAN_TRY_S = 5.0
"""How long the first try to get a mean from a silo takes at most; each one more may take twice as long."""
_MAX_DOUBLINGS = 7
_MAX_METRICS = claims.DEFAULT_LIMITS.num_metrics - 2
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """What the worker does for a round. `train` makes the silo's model a trained one, `prepare` ready for neighbours.

    `sign` signs with the key with which the client is enrolled, `export` stores a job's mean for its owner, and
    `record` notes what is sent next (`AssignedWork.record`).
    """

    job_id: str
    round: int
    trains: bool
    train: Callable[[], None]
    prepare: Callable[[], None]
    sign: Callable[[bytes], bytes]
    draw: Callable[[int], bytes]
    export: Callable[[Path], Path]
    record: Callable[[ReleasedItem], None]


class SiloRound:
    """Follows the steps of the server. `models` and `means` are what others may have of the silo.

    Raises `Cancelled` when the assignment has ended, `AssignmentFailedError`, `GossipError` and `OSError`.
    """

    def __init__(
        self, work: RoundWork, model: SiloModel, network: PeerNetwork, calls: SiloCalls, models: Offers, means: Offers
    ) -> None:
        self._work = work
        self._model = model
        self._network = network
        self._calls = calls
        self._models = models
        self._means = means
        self._is_announced = False
        self._ring_keys: dict[int, KeyPair] = {}
        self._reported_means = set[int]()
        self._mean_backoff = Backoff(calls.control.options)
        self._ring_backoff = Backoff(calls.control.options)
        self._num_mean_tries = 0

    def run(self) -> None:
        """Take part until the round is over for the silo."""
        step = self._calls.take()  # a restarted silo may have to mix before it trains
        while True:
            self._serve(step)
            if isinstance(step.instruction, steps.Leave):
                self._model.end_round()
                return
            step = self._act(step)
            self._model.count_bytes(*self._network.counter.take())

    def _act(self, step: steps.SiloStep) -> steps.SiloStep:
        """Do what a step says; return the next one."""
        match step.instruction:
            case steps.FetchModels():
                return self._fetch(step, step.instruction)
            case steps.MixModels():
                self._mix(step.instruction)
                return self._calls.take()
            case steps.SendKey():
                return self._calls.take(self._offer_key(step.instruction.attempt))
            case steps.ReduceModels():
                return self._reduce(step, step.instruction)
            case steps.AdoptMean():
                return self._adopt(step.instruction)
            case _:
                return self._calls.wait(step) if self._is_announced else self._announce()

    def _serve(self, step: steps.SiloStep) -> None:
        """Let other silos have what the step says."""
        with contextlib.suppress(PeerError):  # the certificate of the port is still valid
            self._network.port.keep_certificate(self._calls.control.signal)
        needs_one = not self._network.port.address
        self._models.update(
            Delivery(receiver, digest, path)
            for receiver in self._filter_trusted(step.model_receivers)
            for digest, path in self._model.list_offers(receiver.silo, all_files=not needs_one).items()
        )
        mean = self._model.state.mean
        if mean is None or mean.round != self._model.state.adopted_round or not step.mean_receivers:
            return  # what was offered stays, also after the round
        if (path := self._model.find(mean.digest)) is not None:
            receivers = (each for each in self._filter_trusted(step.mean_receivers) if each.relay_key or not needs_one)
            self._means.update(Delivery(receiver, mean.digest, path) for receiver in receivers)

    def _filter_trusted(self, receivers: Iterable[steps.Contact]) -> Iterator[steps.Contact]:
        for each in receivers:
            if self._network.is_trusted(each):
                yield each
            else:
                text = "A silo gets no models: it is not one of the trusted clients."
                _logger.warning(text, extra={"peer": each.silo})

    def _announce(self) -> steps.SiloStep:
        """Train, unless a trained model is there, and announce the model."""
        state = self._model.state
        if self._work.trains and not state.is_trained and state.prepared != self._work.round:
            self._work.train()
        self._work.prepare()
        self._is_announced = True
        return self._calls.take(self._make_announcement())

    def _make_announcement(self) -> steps.Announce:
        state, own = self._model.state, self._network.own
        announcement = messages.Announcement(
            digest=self._model.announced,
            size_bytes=self._model.file_bytes,
            address=self._network.port.address,
            num_examples=state.num_examples,
            squared_norm=self._model.squared_norm(),
            delta=state.delta,
            relay_key=own.key.encryption_key,
            relay_signature=own.key.signature,
        )
        metrics = dict(itertools.islice(state.metrics.items(), _MAX_METRICS))
        said = ReleasedItem(
            content="announcement", digest=announcement.digest, num_examples=state.num_examples, metrics=metrics
        )
        self._work.record(said)
        sent, received = state.said_bytes
        return steps.Announce(announcement, metrics | {"sent_bytes": float(sent), "received_bytes": float(received)})

    def _fetch(self, step: steps.SiloStep, wanted: steps.FetchModels) -> steps.SiloStep:
        """Get models, and report each that is there or cannot be got."""
        with PhaseWatch(self._calls, step) as watch:
            found = fetch_models(wanted.models, self._model, self._network, watch.phase)
            with contextlib.closing(found):
                for each in found:
                    if watch.phase.signal.is_set():
                        break
                    self._calls.take(self._store(each))
        self._calls.control.signal.check()
        return watch.following or self._calls.take()

    def _store(self, fetched: Fetched) -> steps.SiloReport:
        """Store a model that was fetched; return the report of it."""
        silo, digest, path = fetched.offered.contact.silo, fetched.offered.digest, fetched.path
        if path is not None:
            try:
                distance = self._model.store(silo, digest, path)
                return steps.Exchanged(received=(steps.Received(silo, digest, distance),))
            except (errors.GossipError, ValueError) as exc:
                _logger.warning("The model of a neighbour is not used: %s", exc, extra={"peer": silo})
        return steps.Exchanged(missed=(silo,))

    def _mix(self, instruction: steps.MixModels) -> None:
        row = instruction.row
        if not self._model.mix(row):
            _logger.warning(
                "The models of neighbours are lost, so the silo continues without mixing them.",
                extra={"round": row.round},
            )

    def _offer_key(self, attempt: int) -> steps.SiloReport:
        """Return a fresh key for an attempt; or the mean of an earlier one, once, which then stands."""
        mean, number = self._model.state.mean, self._work.round
        has_mean = mean is not None and mean.round == number and 0 < mean.attempt < attempt
        if mean is not None and has_mean and attempt not in self._reported_means:
            self._reported_means.add(attempt)
            return _report_mean(mean)
        pair = self._ring_keys[attempt] = KeyPair.draw(self._work.draw)
        payload = key_payload(self._work.job_id, number, attempt, self._network.own.client_id, pair.public)
        return steps.OfferKey(attempt, pair.public, self._work.sign(payload), self._model.find_largest())

    def _reduce(self, step: steps.SiloStep, instruction: steps.ReduceModels) -> steps.SiloStep:
        """Take part in a ring, and report the mean, or where the ring broke."""
        ring, mean, own = instruction.ring, self._model.state.mean, self._network.own.client_id
        if mean is not None and (mean.round, mean.attempt) == (ring.round, ring.attempt):
            following = self._calls.take(_report_mean(mean))
            if following.known != step.known:
                return following
            return self._calls.take(steps.Broken(ring.attempt, own, 0))  # after a restart it has no chunks for others
        key = self._ring_keys.pop(ring.attempt, None)  # for one ring only
        if key is None:
            return self._calls.take(steps.Broken(ring.attempt, own, 0))
        masks = Protection(masked=self._model.is_ring, min_clients=len(ring.members))
        self._work.record(ReleasedItem(content="ring", size_bytes=self._model.mean_bytes, protection=masks))
        with PhaseWatch(self._calls, step) as watch:
            try:
                run = RingRun(
                    self._work.job_id,
                    ring,
                    instruction.contacts,
                    key,
                    self._model.read(),
                    self._network,
                    is_secret=self._model.is_ring,
                )
                with run.run(watch.phase):
                    chunks = run.member.chunk_digests()
                    mean = self._model.keep_mean(run.member.mean(), ring.round, ring.attempt, chunks)
                    self._calls.take(_report_mean(mean))
                    watch.wait()  # the next silo may still need the last chunks
            except (BrokenRingError, errors.GossipError) as exc:
                sender, number = (exc.sender, exc.step) if isinstance(exc, BrokenRingError) else (own, 0)
                if not watch.phase.signal.is_set():
                    _logger.warning("The ring broke: %s", exc, extra={"peer": sender, "step": number})
                    # Else silos that never trust the ring would make attempt after attempt.
                    self._calls.control.options.wait(watch.phase.signal, self._ring_backoff.next_s())
                    self._calls.take(steps.Broken(ring.attempt, sender, number))
                    watch.wait()
            except Cancelled:
                pass  # the phase is over
        self._calls.control.signal.check()
        return watch.following or self._calls.take()

    def _adopt(self, instruction: steps.AdoptMean) -> steps.SiloStep:
        """Replace the silo's model by a mean, once its file is there."""
        digest = instruction.digest
        path = self._model.find(digest) or self._get_mean(instruction)
        if path is None:
            return self._ask_for_mean(instruction)
        self._model.check_mean(path)
        if instruction.is_last:  # before the mean is adopted, since it is said once only
            exported = self._work.export(path)
            fields = {"job": self._work.job_id, "digest": digest}
            _logger.info("The job has ended; the mean of all silos is in %s.", exported, extra=fields)
        self._model.adopt(path, digest, instruction.round)
        self._num_mean_tries = 0
        return self._calls.take()

    def _get_mean(self, instruction: steps.AdoptMean) -> Path | None:
        """Return the file of a mean from one of its holders; None if none of them can send it now."""
        remote = RemoteFile(instruction.digest, self._model.mean_bytes)
        limit_s = _MEAN_TRY_S * 2.0 ** min(self._num_mean_tries, _MAX_DOUBLINGS)  # the file may be large
        for holder in instruction.holders:
            with limit_time(self._calls.control, limit_s) as phase:
                try:
                    if holder.address:
                        return self._network.fetch(holder, remote, phase)
                    if holder.relay_key:
                        return self._network.receive(holder, remote, _MEAN_TRY_S, phase)
                except NotSentYetError:
                    pass
                except (TransferError, CallError) as exc:
                    _logger.info("The mean does not come from a silo yet: %s", exc, extra={"peer": holder.silo})
        return None

    def _ask_for_mean(self, instruction: steps.AdoptMean) -> steps.SiloStep:
        """Wait a while for a mean; announce the silo's model before, so that silos send the mean through the server.

        The model itself does not count until the silo has the mean. In the last round no silo waits for this one, so it
        gives up after some tries.
        """
        self._num_mean_tries += 1
        options = self._calls.control.options
        if instruction.is_last and self._num_mean_tries > options.transfer_attempts:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED,
                f"no silo sends the mean {instruction.digest}, with which the job ended",
            )
        if self._num_mean_tries == 1:
            return self._calls.take(self._make_announcement())
        options.wait(self._calls.control.signal, self._mean_backoff.next_s())
        self._calls.control.signal.check()
        return self._calls.take()


def _report_mean(mean: PendingMean) -> steps.Completed:
    return steps.Completed(mean.attempt, mean.digest, mean.squared_distance, mean.chunks)
