"""Run one assignment of a decentralised job: the part of this client's silo in one round."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import structs

from fedplat.codecs import Codec
from fedplat.config.plugins import build_checked
from fedplat.errors import CodecError, GossipError, PluginError, UserCodeError
from fedplat.gossip import steps
from fedplat.gossip.steps import GossipSetup, Progress
from fedplat.secure_aggregation import messages, primitives, relay
from fedplat.wire.messages import to_record
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._protocols.gossip import model, silo_round
from fedplat_client._protocols.gossip.calls import SiloCalls
from fedplat_client._protocols.gossip.network import (
    ByteCounter,
    Delivery,
    Offers,
    PeerNetwork,
    PortOffers,
    RecordedOffers,
    RelayOffers,
)
from fedplat_client._state import silo_store, two_phase
from fedplat_client._state.released import ReleasedItem
from fedplat_client._work import training
from fedplat_client._work.heartbeat import AssignmentFailedError, CheckInResult, StepCalls
from fedplat_client._work.peers.fetch import PeerFetcher
from fedplat_client._work.peers.port import PeerPort
from fedplat_client._work.training import fit_model, stage_client_state
from fedplat_client._work.work import AssignedWork
from fedplat_client.errors import ClientError
from fedplat_client.options import ClientOptions
from fedplat_client.task import Task, TrainResult

_TRAINING_ID_BYTES = 16
_logger = logging.getLogger(__name__)


class TrainedLateError(ClientError):
    """The server has continued without the silo, whose model is trained now, and counts in the next round."""


@dataclass(frozen=True, kw_only=True)
class SiloParts:
    """What only silos need of the client. `client_id` returns the id with which the client is enrolled."""

    store: silo_store.SiloStore
    port: PeerPort
    client_id: Callable[[], str]


class SiloWorker:
    """Runs assignments of decentralised jobs, one after the other; a context manager.

    Between rounds it offers the last mean at the client's port, for silos that missed it.
    """

    def __init__(self, parts: SiloParts) -> None:
        self._parts = parts
        self._counter = ByteCounter()
        listener = parts.port.listener
        self._means = PortOffers(listener, self._counter) if listener is not None else None

    def __enter__(self) -> SiloWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._means is not None:
            self._means.close()

    def find_unfinished(self) -> list[fleet_pb2.Assignment]:
        """Return the assignments that were not over when the client ended, which `run` continues.

        Otherwise a silo whose process ends before it has the last mean of a job would never get it.
        """
        try:
            return [fleet_pb2.Assignment.FromString(content) for content in self._parts.store.find_unfinished()]
        except (OSError, DecodeError) as exc:
            _logger.warning("The state of decentralised jobs cannot be read: %s", exc)
            return []

    def forget(self, assignment: fleet_pb2.Assignment) -> None:
        """Do not continue an assignment again."""
        try:
            folder = self._parts.store.open(assignment.job_id)
            folder.save(structs.replace(folder.state, assignment=b"", relay=None))
        except OSError as exc:
            _logger.warning("The state of a decentralised job cannot be stored: %s", exc)

    def run(self, work: AssignedWork) -> CheckInResult:
        """Take part in a round. Raises `AssignmentFailedError`, `Cancelled` or `CallError`."""
        setup = _read_setup(work.assignment, work.options)
        work.control.trained = True  # except while the trainer runs
        try:
            with work.heartbeat():
                taken = _Part(self._parts, work, setup)
                taken.run(self._counter, self._means)
            _logger.info("The silo's part in the round is over.", extra={**work.fields, **taken.describe()})
        except TrainedLateError:
            _logger.info("The model was trained late, and counts in the next round.", extra=work.fields)
        except (GossipError, OSError) as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the silo's files cannot be used: {exc}"
            ) from exc
        except (CodecError, PluginError, UserCodeError) as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRAINER_ERROR, f"the silo's model cannot be encoded: {exc}"
            ) from exc
        return CheckInResult(failed=False)


class _Part:
    """The silo's part in the round of one assignment."""

    def __init__(self, parts: SiloParts, work: AssignedWork, setup: GossipSetup) -> None:
        self._parts = parts
        self._client = work.parts
        self._assignment = assignment = work.assignment
        self._setup = setup
        self._control = work.control
        self._span = work.span
        self._record = work.record
        self._trainer = work.parts.trainers.find_trainer(assignment.trainer)
        codec = self._make_codec()
        with work.span("download"):
            initial, _ = work.parts.downloader.load(assignment, work.control)
        self._folder: silo_store.SiloFolder = parts.store.open(assignment.job_id)
        self._model = model.SiloModel(self._folder, initial, setup, codec)
        self._model.begin_round(_encode(assignment))
        self._relay = self._open_relay()

    def run(self, counter: ByteCounter, port_means: PortOffers | None) -> None:
        """Take part until the round is over for the silo."""
        parts, assignment, listener = self._parts, self._assignment, self._parts.port.listener
        work = silo_round.RoundWork(
            job_id=assignment.job_id,
            round=assignment.round,
            trains=self._setup.trains,
            train=self._train,
            prepare=self._prepare,
            sign=self._client.key.sign,
            draw=os.urandom,
            export=lambda path: parts.store.export(assignment.job_id, path),
            record=self._record,
        )
        calls = SiloCalls(StepCalls(self._client.connection, assignment.token, self._control), self._progress)
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(self._open_network(counter))
            models: Offers = PortOffers(listener, counter) if listener else RelayOffers(network, self._client.options)
            stack.callback(models.close)
            means: Offers
            if port_means is None:
                means = RelayOffers(network, self._client.options)
                stack.callback(means.close)
            else:
                means = port_means
            recorded = (RecordedOffers(each, self._record_file) for each in (models, means))
            with self._span("exchange"):
                silo_round.SiloRound(work, self._model, network, calls, *recorded).run()

    def _record_file(self, delivery: Delivery) -> None:
        size_bytes, receiver = delivery.path.stat().st_size, delivery.receiver.silo
        self._record(ReleasedItem(content="model", receiver=receiver, size_bytes=size_bytes, digest=delivery.digest))

    def describe(self) -> dict[str, object]:
        """Return what the silo has done, as fields of the log."""
        state = self._model.state
        return {
            "mixed_round": state.mixed_round,
            "adopted_round": state.adopted_round,
            "sent_bytes": state.num_bytes[0],
            "received_bytes": state.num_bytes[1],
        }

    def _make_codec(self) -> Codec | None:
        options = training.read_codec(self._assignment, self._client.trainers.plugins)
        try:
            return build_checked(options, Codec, "compression.uplink.codec") if options is not None else None
        except (PluginError, UserCodeError) as exc:
            raise AssignmentFailedError(model_pb2.REASON_UNKNOWN_CODEC, str(exc)) from exc

    def _open_relay(self) -> silo_store.RelaySecret:
        """Return the key for files through the server: after a restart the one before, which others have."""
        stored, number = self._folder.state.relay, (self._assignment.round, self._assignment.attempt)
        if stored is not None and (stored.round, stored.attempt) == number:
            return stored
        return silo_store.RelaySecret(*number, os.urandom(messages.KEY_BYTES))

    def _open_network(self, counter: ByteCounter) -> PeerNetwork:
        client, assignment = self._client, self._assignment
        exchange = relay.RelayExchange(assignment.job_id, assignment.round, assignment.attempt)
        key, client_id = primitives.KeyPair(self._relay.secret), self._parts.client_id()
        return PeerNetwork(
            connection=client.connection,
            token=assignment.token,
            exchange=exchange,
            own=relay.RelayMember(client_id, client.key.public, exchange.advertise(client_id, key, client.key.sign)),
            key=key,
            trusted=client.options.trusted_keys,
            port=self._parts.port,
            fetcher=PeerFetcher(self._folder.received, client.options),
            folder=self._folder.received,
            counter=counter,
            max_share=client.options.max_share,
        )

    def _progress(self) -> Progress:
        state = self._model.state
        return Progress(state.mixed_round, state.adopted_round)

    def _prepare(self) -> None:
        rng = np.random.default_rng(self._client.options.rng.getrandbits(128))
        self._model.prepare(self._assignment.round, self._relay, rng)

    def _train(self) -> None:
        """Train the silo's model and store the result. Raises `TrainedLateError` if the round is over meanwhile."""
        job_id, store, state = self._assignment.job_id, self._client.client_states, self._model.state
        client_state = store.open(job_id, lambda sent: sent.token == state.training, training=True)
        base = self._model.to_parameters()
        task = self._client.trainers.make_task(self._assignment, base.copy(), client_state, self._control)
        result = self._run_trainer(task)
        update = fit_model(self._control, lambda: result.to_update(base))
        try:
            digest = self._model.add_update(update)
        except GossipError as exc:
            raise AssignmentFailedError(model_pb2.REASON_TRAINER_ERROR, str(exc)) from exc
        training = os.urandom(_TRAINING_ID_BYTES).hex()
        stage_client_state(store, job_id, two_phase.SentReport(training, digest), client_state, self._control)
        self._model.finish_training(training, digest, update, result.num_examples, result.metrics)
        if self._control.is_late:
            raise TrainedLateError("the round was over before the training")

    def _run_trainer(self, task: Task) -> TrainResult:
        """Run the trainer; the server's orders to stop count only meanwhile."""
        self._control.trained = False
        try:
            with self._span("train"):
                return self._trainer(task)
        finally:
            self._control.trained = True


def _encode(assignment: fleet_pb2.Assignment) -> bytes:
    """Encode an assignment without the model in it, which may be large."""
    kept = fleet_pb2.Assignment()
    kept.CopyFrom(assignment)
    kept.ClearField("model_bytes")
    return kept.SerializeToString(deterministic=True)


def _read_setup(assignment: fleet_pb2.Assignment, options: ClientOptions) -> GossipSetup:
    """Decode the setup of an assignment. Raises `AssignmentFailedError` if the client's owner does not allow it."""
    if not options.takes_exchanges:
        problem = "does not allow that other clients see its models, and exchange_models is not set"
        if options.require_secure_aggregation or options.requires_noise:
            problem = "allows training only with secure aggregation"
        raise AssignmentFailedError(
            model_pb2.REASON_UNSAFE_AGGREGATION, f"the owner of this client {problem}; the job is decentralised"
        )
    try:
        return to_record(assignment.gossip_setup, GossipSetup, steps.MAX_MESSAGE_BYTES)
    except ValueError as exc:
        text = f"the setup of the decentralised job is not usable: {exc}"
        raise AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, text) from exc
