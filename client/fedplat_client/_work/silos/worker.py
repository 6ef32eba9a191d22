"""Runs assignments of decentralised jobs: checks the owner's consent, trains the silo's model, and exchanges it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from msgspec import structs

from fedplat.codecs import Codec
from fedplat.codecs.container import Format, options_from_text
from fedplat.errors import CodecError, GossipError, PluginError, UserCodeError
from fedplat.gossip import steps
from fedplat.gossip.steps import Contact, ExchangeSetup
from fedplat.model import Parameters
from fedplat.secure_aggregation.relay import RelayExchange, RelayMember
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import spans
from fedplat_client._auth.calls import Connection
from fedplat_client._auth.peer_access import PeerAccess
from fedplat_client._state.keys import SigningKey
from fedplat_client._state.silo_store import SiloFolder, SiloStore
from fedplat_client._state.two_phase import SentReport
from fedplat_client._work.heartbeat import Heartbeat
from fedplat_client._work.outcomes import AssignmentFailedError, CheckInResult
from fedplat_client._work.peers.fetch import PeerFetcher
from fedplat_client._work.peers.listener import PeerListener
from fedplat_client._work.silos.exchange import ModelExchange, RoundOverError
from fedplat_client._work.silos.model import SiloModel
from fedplat_client._work.silos.network import ByteCounter, PeerNetwork
from fedplat_client._work.training import Training, fit_model
from fedplat_client.options import ClientOptions
from fedplat_client.task import Control

_logger = logging.getLogger(__name__)


class _OfferedMean(NamedTuple):
    digest: str
    receivers: frozenset[str]
    offer: contextlib.ExitStack


@dataclass(frozen=True, kw_only=True)
class SiloWorker:
    """The client as a silo of any number of jobs; a context manager that withdraws the means that it offers.

    `client_id` returns the client's id. Without a `listener` files go through the server, and without `access` the
    client gets none from ports of others.
    """

    connection: Connection
    training: Training
    store: SiloStore
    options: ClientOptions
    key: SigningKey
    client_id: Callable[[], str]
    listener: PeerListener | None = None
    access: PeerAccess | None = None
    _means: dict[str, _OfferedMean] = field(default_factory=dict[str, "_OfferedMean"])
    _counters: defaultdict[str, ByteCounter] = field(default_factory=lambda: defaultdict(ByteCounter))

    def __enter__(self) -> SiloWorker:
        return self

    def __exit__(self, *_: object) -> None:
        for mean in self._means.values():
            mean.offer.close()
        self._means.clear()

    def find_unfinished(self) -> list[fleet_pb2.Assignment]:
        """Return the assignments that were not over when the client ended; `run` continues them."""
        try:
            return [fleet_pb2.Assignment.FromString(content) for content in self.store.find_unfinished()]
        except (OSError, DecodeError) as exc:
            _logger.warning("The state of decentralised jobs cannot be read: %s", exc)
            return []

    def run(
        self, assignment: fleet_pb2.Assignment, control: Control, span: spans.Start, fields: Mapping[str, object]
    ) -> CheckInResult:
        """Take part in a round until it is over for this silo. Raises `AssignmentFailedError` or `Cancelled`."""
        setup = _read_setup(assignment, self.options)
        control.has_deadline = False
        try:
            folder = self.store.open(assignment.job_id)
            folder.save(structs.replace(folder.state, assignment=_encode(assignment)))
            try:
                return self._take_part(assignment, setup, folder, control, span, fields)
            except AssignmentFailedError:
                _close(folder)
                raise
        except OSError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the silo's files cannot be used: {exc}"
            ) from exc

    def _take_part(
        self,
        assignment: fleet_pb2.Assignment,
        setup: ExchangeSetup,
        folder: SiloFolder,
        control: Control,
        span: spans.Start,
        fields: Mapping[str, object],
    ) -> CheckInResult:
        model = self._open_model(assignment, setup, folder, control)
        refusal = None
        with self._connect(assignment, folder, model) as network:
            exchange = self._make_exchange(assignment, model, network, control)
            try:
                if exchange.catch_up():
                    if setup.trains and not model.state.is_trained and model.state.mixed_round < assignment.round:
                        with Heartbeat(self.connection, assignment.token, assignment.heartbeat_s, control):
                            self._train(assignment, model, control, span)
                    with span("exchange"):
                        exchange.run()
            except RoundOverError as exc:
                refusal = exc.stop
        model.count_bytes(*network.counter.take())
        totals = {"sent_bytes": model.state.sent_bytes, "received_bytes": model.state.received_bytes}
        text = "The round is over for this silo" + (f": {refusal.text}" if refusal is not None else ".")
        _logger.info(text, extra={**fields, **totals})
        _close(folder)
        retry = refusal.retry if refusal is not None else None
        return CheckInResult(failed=refusal is not None and retry is None, retry=retry)

    def _open_model(
        self, assignment: fleet_pb2.Assignment, setup: ExchangeSetup, folder: SiloFolder, control: Control
    ) -> SiloModel:
        path = folder.find(assignment.model.digest) if folder.state.initial == assignment.model.digest else None
        initial = Parameters.open(path) if path is not None else self.training.get_model(assignment, control).base
        return SiloModel(folder, initial, setup, self._make_codec(assignment, initial))

    def _make_codec(self, assignment: fleet_pb2.Assignment, initial: Parameters) -> Codec | None:
        try:
            text = assignment.uplink
            options = options_from_text(text, self.training.plugins) if text else None
            return Format(options, initial.schema).codec if options is not None else None
        except (CodecError, PluginError, UserCodeError) as exc:
            raise AssignmentFailedError(model_pb2.REASON_UNKNOWN_CODEC, str(exc)) from exc

    def _connect(self, assignment: fleet_pb2.Assignment, folder: SiloFolder, model: SiloModel) -> PeerNetwork:
        exchange = RelayExchange(assignment.job_id, assignment.round, assignment.attempt)
        pair, client_id = model.relay_key(assignment.round, assignment.attempt), self.client_id()
        own = RelayMember(client_id, self.key.public, exchange.advertise(client_id, pair, self.key.sign))
        fetcher = PeerFetcher(folder.fetched, self.options)
        fetcher.keep_only(())
        return PeerNetwork(
            connection=self.connection,
            token=assignment.token,
            exchange=exchange,
            own=own,
            key=pair,
            trusted=self.options.trusted_keys,
            listener=self.listener,
            access=self.access,
            fetcher=fetcher,
            folder=folder.fetched,
            counter=self._counters[assignment.job_id],
        )

    def _make_exchange(
        self, assignment: fleet_pb2.Assignment, model: SiloModel, network: PeerNetwork, control: Control
    ) -> ModelExchange:
        return ModelExchange(
            connection=self.connection,
            assignment=assignment,
            control=control,
            model=model,
            network=network,
            key=self.key,
            address=self.options.peer_address or self.options.peer_listen,
            min_ring=self.options.min_secure_clients,
            publish_mean=functools.partial(self._publish_mean, assignment.job_id, network),
            export=functools.partial(self._export, assignment),
        )

    def _train(self, assignment: fleet_pb2.Assignment, model: SiloModel, control: Control, span: spans.Start) -> None:
        """Train the silo's model. After a crash at any point the training is repeated, or was stored whole."""
        run, training = self.training.find_trainer(assignment.trainer), self.training
        client_state = training.open_client_state(
            assignment.job_id, lambda sent: sent.token == model.state.trained_token, training=True
        )
        base = model.begin_training()
        with span("train"):
            result = run(training.make_task(assignment, base.copy(), client_state, control))
        update = fit_model(lambda: result.to_update(base))
        try:
            digest = model.add_update(update)
        except GossipError as exc:
            raise AssignmentFailedError(model_pb2.REASON_TRAINER_ERROR, str(exc)) from exc
        training.stage_client_state(assignment.job_id, SentReport(assignment.token, digest), client_state)
        model.finish_training(digest, assignment.token, update, result.num_examples, result.metrics)

    def _publish_mean(
        self, job_id: str, network: PeerNetwork, digest: str, path: Path, receivers: Sequence[Contact]
    ) -> None:
        before, names = self._means.get(job_id), frozenset(each.silo for each in receivers)
        if before is not None and (before.digest, before.receivers) == (digest, names):
            return
        mean = _OfferedMean(digest, names, contextlib.ExitStack())
        mean.offer.enter_context(network.offer(digest, path, receivers))
        self._means[job_id] = mean
        if before is not None:
            before.offer.close()

    def _export(self, assignment: fleet_pb2.Assignment, model: Path) -> None:
        path = self.store.export(assignment.job_id, model)
        _logger.info(
            "The model of the job is exported.",
            extra={"job": assignment.job_id, "job_name": assignment.job_name, "file": str(path)},
        )


def _read_setup(assignment: fleet_pb2.Assignment, options: ClientOptions) -> ExchangeSetup:
    """Decode the setup of an assignment. Raises `AssignmentFailedError` if the owner does not allow the exchange."""
    try:
        setup = steps.decode_setup(assignment.exchange_setup)
    except GossipError as exc:
        raise AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, str(exc)) from exc
    problem = ""
    if not options.takes_part_in_exchanges:
        problem = "does not allow that other clients get its model (exchange_models)"
    elif options.require_local_noise:
        problem = "allows only updates to which the client adds noise, and models that are exchanged have none"
    elif options.require_secure_aggregation and setup.exchange != "ring":
        problem = f'requires that nobody sees its model; exchange = "{setup.exchange}" shows it to neighbours'
    if problem:
        raise AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, f"the owner of this client {problem}")
    return setup


def _encode(assignment: fleet_pb2.Assignment) -> bytes:
    """Encode an assignment without the model in it, which has a file."""
    kept = fleet_pb2.Assignment()
    kept.CopyFrom(assignment)
    kept.ClearField("model_bytes")
    return kept.SerializeToString(deterministic=True)


def _close(folder: SiloFolder) -> None:
    """Record that an assignment is over, and delete the key of its relay."""
    folder.save(structs.replace(folder.state, assignment=b"", relay=None))
