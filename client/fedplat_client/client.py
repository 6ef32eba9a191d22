"""The client: a loop that checks in for assignments and runs them, retrying through failures, until it is stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedplat.config.loaded_plugins import CLIENT_KINDS, load_plugins
from fedplat.secure_aggregation import setup
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import cancellation, errors, link, transport
from fedplat_client._auth import authenticator, enrollment
from fedplat_client._auth.enrollment import ClientDescription, ClientSession, Endpoints
from fedplat_client._auth.mtls import CertificateAccess
from fedplat_client._protocols import registry
from fedplat_client._state import data_dir as data_directory
from fedplat_client._state.approvals import Decision
from fedplat_client._state.data_dir import SigningKey
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client._state.released import ReleaseRecord, Site
from fedplat_client._state.two_phase import ClientStateStore, Residuals, ServedAttempts
from fedplat_client._work import heartbeat, process_group, training, transfer, work
from fedplat_client._work.consent import Consent
from fedplat_client._work.peers.port import PeerPort
from fedplat_client.backoff import Backoff, PollTime, draw_s, is_cut
from fedplat_client.options import ClientOptions, check_text, validate_labels
from fedplat_client.task import EvaluateFunction, TaskOutcome, TrainFunction

if TYPE_CHECKING:
    from fedplat_client._consent.owner import OwnerFiles
    from fedplat_client._protocols.gossip.worker import SiloWorker

Function = TypeVar("Function", TrainFunction, EvaluateFunction)
_NEXT_WAIT_S = 5.0
"""The longest time for which the answer to a report may wait for the next assignment; servers wait shorter."""
_NO_HTTP_ADDRESS = (
    "; the ticket has no address for HTTP/1.1: start the server with --http-listen and --http-address, and use one of "
    "its new tickets"
)
_logger = logging.getLogger(__name__)


class Client:
    """A participant of one population on one server.

    ```python
    client = Client.from_ticket(labels={"region": "eu"})

    @client.trainer("digits")
    def train(task):
        task.parameters["bias"] += 1.0
        return TrainResult(parameters=task.parameters, num_examples=100)

    client.run()
    ```

    Args:
        server: `host:port`.
        population: the group of clients that jobs draw from.
        labels: properties that jobs may select clients by, such as `{"region": "eu"}`.
        data_dir: the directory for identity and models; by default the platform's folder for user data. Two clients
            on one machine need separate directories.
        options: timeouts, sizes and the random generator.
        ticket: the enrollment ticket from an operator; needed until the client has enrolled.
        plugins: codecs and local algorithms that jobs may name: their classes by `KIND.NAME`, such as
            `{"codecs.signs": Signs}`, or references such as `"signs.py:Signs"`, or "" for the entry point of an
            installed package.

    Raises `PluginError` if a plugin cannot be used.
    """

    def __init__(  # noqa: PLR0913 -- one keyword for each property of a client
        self,
        server: str,
        *,
        population: str,
        labels: Mapping[str, str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        options: ClientOptions | None = None,
        ticket: Ticket | None = None,
        plugins: Mapping[str, type | str] | None = None,
    ) -> None:
        self._server = check_text("the server", server)
        self._ticket = ticket
        self._population = check_text("the population", population)
        self._labels = validate_labels(labels or {})
        self._directory = data_directory.DataDirectory(data_directory.resolve_data_dir(data_dir), server, population)
        self._options = options or ClientOptions()
        self._poll_time = PollTime(self._options.check_in_wait_s)
        self._plugins = load_plugins(plugins or {}, CLIENT_KINDS)
        self._trainers: dict[str, TrainFunction] = {}
        self._evaluators: dict[str, EvaluateFunction] = {}
        self._contexts: list[contextlib.AbstractContextManager[object]] = []
        self._stop = cancellation.StopSignal()

    @classmethod
    def from_ticket(
        cls,
        ticket: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        options: ClientOptions | None = None,
        plugins: Mapping[str, type | str] | None = None,
    ) -> Client:
        """Create a client of the server and population named by a ticket.

        Without `ticket`, read it from the environment (FEDPLAT_TICKET, or the file named by FEDPLAT_TICKET_FILE).
        Without one there either, use the identity in the data directory: an enrolled client needs no ticket. Raises
        `TicketError` or `DataDirectoryError`.
        """
        parsed = enrollment.find_ticket(ticket)
        if parsed is None:
            identity = data_directory.find_identity(data_directory.resolve_data_dir(data_dir))
            server, population = identity.server, identity.population
        else:
            server, population = parsed.server, parsed.population
        return cls(
            server,
            population=population,
            labels=labels,
            data_dir=data_dir,
            options=options,
            ticket=parsed,
            plugins=plugins,
        )

    def trainer(self, name: str) -> Callable[[TrainFunction], TrainFunction]:
        """Register the decorated function as the trainer `name`."""
        return lambda function: self.add_trainer(name, function)

    def evaluator(self, name: str) -> Callable[[EvaluateFunction], EvaluateFunction]:
        """Register the decorated function as the evaluator `name`."""
        return lambda function: self.add_evaluator(name, function)

    def add_trainer(self, name: str, function: TrainFunction) -> TrainFunction:
        """Register a trainer and return it. Raises `ValueError` if the name is taken."""
        return training.register(self._trainers, "trainer", name, function)

    def add_evaluator(self, name: str, function: EvaluateFunction) -> EvaluateFunction:
        """Register an evaluator and return it. Raises `ValueError` if the name is taken."""
        return training.register(self._evaluators, "evaluator", name, function)

    def add_context(self, context: contextlib.AbstractContextManager[object]) -> None:
        """Enter a context while the client runs, once its data directory is locked; for what trainers share."""
        self._contexts.append(context)

    @property
    def tasks(self) -> Path:
        """The folder for task folders of programs (`fedplat_client.trainers.external`), in the data directory."""
        return self._directory.tasks

    @property
    def released(self) -> Path:
        """The record of what has left this client, which `fedplat-client released` shows."""
        return self._directory.released

    @property
    def site(self) -> Site:
        """The place that a report of this client names."""
        return Site(self._server, self._population, self._directory.released)

    def load_public_key(self) -> str:
        """Return the public key that identifies this client, hexadecimal, for `trusted_clients` of other clients.

        Before the client's first start, create the key. Raises `DataDirectoryError`.
        """
        return self._directory.load_own_key(self._ticket).public.hex()

    def stop(self) -> None:
        """Make `run` return soon; a stopped client cannot run again. Callable from any thread at any time.

        A running trainer gets `Cancelled` from its next `task.progress`.
        """
        self._stop.set(cancellation.client_stopped())

    def _stop_on_signal(self) -> None:
        _logger.info("The client was told to stop by a signal.", extra=self._fields)
        self.stop()

    def run(self, max_tasks: int | None = None) -> None:
        """Run assignments until `stop`, SIGINT or SIGTERM, or until `max_tasks` of them have ended or failed.

        In a process other than rank 0 of several (`TorchTrainer(parallel=...)` under torchrun, mpirun or srun), join
        the trainings of rank 0 until it ends. Retry an unreachable server without a time limit. Errors that retrying
        cannot fix are raised: `IncompatibleServerError`, `EnrollmentError`, `IdentityError` (the client was revoked, or
        its identity is in use elsewhere), `DataDirectoryError` and `ListenerError`.
        """
        if max_tasks is not None and max_tasks < 0:
            raise ValueError(f"max_tasks is {max_tasks}; expected 0 or more, or None for no limit")
        self._work(max_tasks, math.inf)

    def run_once(self, wait_s: float = 30.0) -> TaskOutcome:
        """Run at most one assignment, for which it waits at most `wait_s`, and return what became of it.

        A client that was killed gets its assignment again, if there is still time for it. Raises the errors of `run`.
        """
        if not wait_s >= 0:
            raise ValueError(f"wait_s is {wait_s}; expected 0 or more seconds")
        return self._work(1, wait_s)

    def _work(self, max_tasks: int | None, wait_s: float) -> TaskOutcome:
        """Run assignments; end after `wait_s` without one."""
        if self._follow():
            return TaskOutcome.DONE
        with process_group.lead(), self._open_session() as (session, prepare, worker, choice):
            backoff, outcome = Backoff(self._options), TaskOutcome.NO_WORK
            patience_at = self._options.clock() + wait_s
            num_tasks = 0
            delay_s = 0.0
            enrolled_again = False  # whether the client has enrolled again since its last success
            upcoming: fleet_pb2.Assignment | None = None  # with which the server has answered the last report
            while num_tasks != max_tasks and not self._stopped_within(delay_s):
                began = self._options.clock()
                try:
                    found, upcoming = upcoming or self._check_in(session, prepare, choice, patience_at), None
                    outcome = TaskOutcome.NO_WORK
                    if isinstance(found, fleet_pb2.Assignment):
                        num_tasks += 1
                        is_last = num_tasks == max_tasks or worker.parts.consent.is_due
                        found = worker.run(found, self._next_check_in(session, is_last=is_last))
                        outcome = found.outcome
                    upcoming = found.next
                    enrolled_again = enrolled_again and found.failed
                    delay_s = self._delay_s(found, backoff)
                except errors.Cancelled:
                    break
                except errors.UnknownClientError as exc:
                    session.forget_enrollment()
                    delay_s = backoff.next_s() if enrolled_again else 0.0
                    enrolled_again = True
                    _logger.warning("The server no longer recognizes this client: %s", exc, extra=self._fields)
                    continue
                except (errors.IncompatibleServerError, errors.IdentityError):
                    raise
                except errors.CallError as exc:
                    delay_s = self._after_failure(exc, self._options.clock() - began, session, choice, backoff)
                    outcome = TaskOutcome.UNREACHABLE
                if outcome is TaskOutcome.LEFT or self._options.clock() + delay_s > patience_at:
                    break
            worker.give_back(upcoming)
        return TaskOutcome.STOPPED if self._stop.is_set() and outcome is not TaskOutcome.DONE else outcome

    def _follow(self) -> bool:
        """Follow rank 0 to its end if this process is another rank; return whether it is. Raises `ValueError`."""
        if not (self._trainers or self._evaluators):
            raise ValueError("the client has no trainer and no evaluator; add one with @client.trainer(name)")
        return process_group.run_follower(self._trainers, self._evaluators, self._plugins.table)

    def _check_in(
        self, session: ClientSession, prepare: Callable[[], None], choice: link.TransportChoice, patience_at: float
    ) -> fleet_pb2.Assignment | heartbeat.CheckInResult:
        """Return an assignment, or the refusal; wait at the server until `patience_at` at most."""
        choice.review(self._stop)
        session.enroll()
        prepare()
        began = self._options.clock()
        try:
            reply = session.check_in(min(self._poll_time.wait_s, max(0.0, patience_at - began)))
        except errors.CallError as exc:
            self._poll_time.note_failure(exc, self._options.clock() - began)
            raise
        self._poll_time.note_answer()
        choice.note_answer()
        return reply.assignment if reply.HasField("assignment") else heartbeat.read_refusal(reply)

    def _next_check_in(self, session: ClientSession, *, is_last: bool) -> fleet_pb2.CheckInRequest | None:
        """Return the check-in that may be sent with the report of an assignment; None if another one is not wanted."""
        if is_last or self._options.takes_exchanges:  # a silo prepares for its next assignment
            return None
        return session.make_check_in(min(self._options.check_in_wait_s, _NEXT_WAIT_S))

    def _log_session(self, way: link.ServerLink, client_id: str) -> None:
        offers = ", ".join(sorted(self._trainers.keys() | self._evaluators.keys()))
        text = "The client is connected to %s as %s of the population %s, offers %s and waits for work."
        _logger.info(text, way.route.server, client_id, self._population, offers, extra={"client": client_id})

    def _after_failure(
        self,
        exc: errors.CallError,
        lasted_s: float,
        session: ClientSession,
        choice: link.TransportChoice,
        backoff: Backoff,
    ) -> float:
        """Log a call that has failed after so long; return the delay in seconds before the next one."""
        delay_s = backoff.next_after(exc, lasted_s)
        fields = {**self._fields, "retry_s": round(delay_s, 3)}
        if is_cut(exc, lasted_s):
            _logger.debug("The connection ended while the client waited for work: %s", exc, extra=fields)
        else:
            _logger.warning("The server cannot be used: %s", session.explain_error(exc), extra=fields)
        with contextlib.suppress(errors.Cancelled):  # the loop ends
            if choice.note_failure(exc, lasted_s, self._stop):
                backoff.reset()
                return 0.0
        return delay_s

    @contextlib.contextmanager
    def _open_session(
        self,
    ) -> Generator[tuple[ClientSession, Callable[[], None], work.AssignmentWorker, link.TransportChoice]]:
        with self._directory.lock(), cancellation.on_signals(self._stop_on_signal), contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            identity = self._directory.load_identity(self._ticket)
            key = self._directory.load_signing_key(identity)
            choice = link.TransportChoice(self._routes(identity), self._directory.transport)
            way = stack.enter_context(choice.link)
            on_session = functools.partial(self._log_session, way)
            signed = authenticator.SignedAccess(way, key, self._options.call_timeout_s, on_session)
            access = stack.enter_context(self._certificates(signed, identity)) if self._options.mtls else signed
            # A certificate has one connection, which is renewed with it.
            connection = authenticator.Connection(
                access, self._options.call_timeout_s, way if access is signed else None
            )
            port = stack.enter_context(self._peer_port(signed, identity))
            open_silos = functools.cache(lambda: stack.enter_context(self._open_silos(parts, port, signed)))
            parts = self._open_parts(connection, key)
            halves = registry.make_halves(open_silos)
            worker = work.AssignmentWorker(parts, lambda each: halves[registry.name_of(each)])
            endpoints = Endpoints(signed, connection, way)
            self._poll_time = PollTime(min(self._options.check_in_wait_s, parts.consent.longest_wait_s))
            description = self._description(parts.consent)
            session = ClientSession(endpoints, self._directory, identity, description, self._stop)
            is_silo = self._options.takes_exchanges or self._directory.silos.exists()
            unfinished = open_silos().find_unfinished() if is_silo else []

            def prepare() -> None:
                """Open the client's port; continue the rounds of decentralised jobs that the last process began."""
                port.keep_open(self._stop)
                parts.consent.refresh(connection, self._stop)
                while unfinished and not self._stop.is_set():
                    begun = unfinished.pop()
                    worker.run(begun)
                    if not self._stop.is_set():
                        open_silos().forget(begun)

            yield session, prepare, worker, choice

    def _routes(self, identity: data_directory.Identity) -> dict[str, transport.ServerRoute]:
        """Return the ways to the server that may be used, by the names of their transports."""
        options = self._options
        grpc = transport.ServerRoute(
            self._server, identity.tls, identity.ca + options.read_authorities(), options.proxy
        )
        # Where the load balancer chooses by ALPN, both have one address.
        hint = _NO_HTTP_ADDRESS * (options.transport == transport.HTTP and not identity.http)
        http = dataclasses.replace(grpc, server=identity.http or self._server, hint=hint, transport=transport.HTTP)
        routes = {transport.GRPC: grpc, transport.HTTP: http}
        return {name: route for name, route in routes.items() if name in options.transports}

    def _open_parts(self, connection: authenticator.Connection, key: SigningKey) -> work.ClientParts:
        directory, options = self._directory, self._options
        try:
            cache = ModelCache(directory.models, options.cache_limit_bytes)
        except OSError as exc:
            raise errors.DataDirectoryError(
                f"{directory.models} cannot be used: {exc}; free space or make it writable"
            ) from exc
        record = ReleaseRecord(directory.released, cache.give_way)
        return work.ClientParts(
            connection=connection,
            downloader=transfer.Downloader(connection, cache, options.max_model_bytes, self._plugins.table),
            residuals=Residuals(directory.residuals, options.cache_limit_bytes, cache.give_way),
            served=ServedAttempts(directory.served),
            record=record,
            consent=self._open_consent(key, record),
            client_states=ClientStateStore(directory.client_states, options.cache_limit_bytes, cache.give_way),
            trainers=training.LocalTrainers(
                trainers=self._trainers,
                evaluators=self._evaluators,
                ledger=PrivacyLedger(directory.privacy, f"{self._server} {self._population}"),
                plugins=self._plugins.table,
            ),
            options=options,
            stop=self._stop,
            key=key,
        )

    def _open_silos(self, client: work.ClientParts, port: PeerPort, signed: authenticator.SignedAccess) -> SiloWorker:
        """Return what runs assignments of decentralised jobs; other clients do not load its modules."""
        from fedplat_client._protocols.gossip.worker import SiloParts, SiloWorker
        from fedplat_client._state.silo_store import SiloStore

        directory, limit_bytes = self._directory, self._options.cache_limit_bytes
        parts = SiloParts(
            store=SiloStore(directory.silos, directory.exports, limit_bytes, client.downloader.cache.give_way),
            port=port,
            client_id=lambda: signed.client_id,
        )
        return SiloWorker(parts)

    def _open_consent(self, key: SigningKey, record: ReleaseRecord) -> Consent:
        """Return the consent of the client's owner; clients whose owner approves no jobs do not load its modules."""
        directory, options = self._directory, self._options
        is_asked = options.require_approval or options.policy is not None
        if not (is_asked or directory.policy.exists() or directory.approvals.exists()):
            return Consent()
        from fedplat_client._consent.owner import OwnerConsent, open_files

        return OwnerConsent(open_files(directory, key, options.policy, self._plugins.table), record, options.clock)

    def open_owner_files(self) -> OwnerFiles:
        """Return what the client's owner decides on jobs with, also while the client runs.

        Before the client's first start, create its key. Raises `DataDirectoryError`.
        """
        from fedplat_client._consent.owner import open_files

        key = self._directory.load_own_key(self._ticket)
        return open_files(self._directory, key, self._options.policy, self._plugins.table)

    def fetch_offers(self) -> None:
        """Get the jobs that the server offers, for a client that does not run. Raises `CallError` or `ClientError`."""
        with self._open_session() as (session, _, worker, _):
            session.enroll()
            worker.parts.consent.refresh(worker.parts.connection, self._stop)

    def decide(self, digest: str, decision: Decision) -> None:
        """Store a decision of the owner on the job with a digest, also while the client runs.

        A client that runs, or else this call, notes it in the record. Raises `DataDirectoryError`.
        """
        from fedplat_client._consent.owner import note_decision

        decisions = self.open_owner_files().approvals.decide(digest, decision)
        with contextlib.suppress(errors.DataDirectoryInUseError), self._directory.lock():
            note_decision(ReleaseRecord(self._directory.released), decisions)

    def _description(self, consent: Consent) -> ClientDescription:
        features = [] if self._options.leaves_tasks else [setup.FEATURE]
        if self._options.takes_exchanges:
            from fedplat.gossip import steps

            features.append(steps.FEATURE)
        if any(hasattr(each, "answer") for each in self._trainers.values()):
            from fedplat.procedures import contract

            features += [contract.FEATURE] if self._options.leaves_tasks else [contract.FEATURE, setup.EXACT_FEATURE]
        return ClientDescription(
            ticket=self._ticket,
            population=self._population,
            labels=self._labels,
            trainers=sorted(self._trainers),
            evaluators=sorted(self._evaluators),
            features=features,
            plugins=self._plugins,
            announce=consent.announce,
        )

    def _certificates(self, signed: authenticator.SignedAccess, identity: data_directory.Identity) -> CertificateAccess:
        return CertificateAccess(signed, self._directory, identity, self._options.call_timeout_s, self._options.clock)

    @contextlib.contextmanager
    def _peer_port(self, signed: authenticator.SignedAccess, identity: data_directory.Identity) -> Generator[PeerPort]:
        """Yield the client's ways to other clients, and its own port if it has one, which is not open yet."""
        options, listen = self._options, self._options.peer_listen
        if not options.takes_exchanges and not listen:
            yield PeerPort()
            return
        if not identity.tls and not listen:
            yield PeerPort()  # it can still exchange models through the server
            return
        from fedplat_client._auth.mtls import PeerAccess
        from fedplat_client._work.peers.listener import PeerListener

        access = PeerAccess(
            signed, self._directory, identity, options.call_timeout_s, listens=bool(listen), clock=options.clock
        )
        if not listen:
            yield PeerPort(access)
            return
        with PeerListener(listen, lambda: access.current) as listener:
            yield PeerPort(access, listener, options.peer_address or listen)

    def _stopped_within(self, delay_s: float) -> bool:
        return self._options.wait(self._stop, delay_s) if delay_s > 0 else self._stop.is_set()

    def _delay_s(self, outcome: heartbeat.CheckInResult, backoff: Backoff) -> float:
        if not outcome.failed:
            backoff.reset()
        if outcome.retry is not None:
            return draw_s(outcome.retry, self._options.rng)
        return backoff.next_s() if outcome.failed else 0.0

    @property
    def _fields(self) -> dict[str, object]:
        return {"server": self._server, "population": self._population}
