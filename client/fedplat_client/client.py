"""The client: a loop that asks the server for work and does it, through every failure, until it is stopped."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from fedplat.auth import Ticket
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import cancellation, transport
from fedplat_client._auth import tickets
from fedplat_client._auth.authenticator import SignedAccess
from fedplat_client._auth.calls import Connection
from fedplat_client._auth.enrollment import ClientDescription, ClientSession, Endpoints
from fedplat_client._auth.mtls import CertificateAccess
from fedplat_client._state import data_dir as identity
from fedplat_client._state.client_state import ClientStateStore
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client._state.residuals import Residuals
from fedplat_client._work import assignment, process_group
from fedplat_client.backoff import Backoff, draw_s
from fedplat_client.errors import (
    CallError,
    Cancelled,
    DataDirectoryError,
    IdentityError,
    IncompatibleServerError,
    UnknownClientError,
)
from fedplat_client.options import ClientOptions
from fedplat_client.task import EvaluateFunction, TrainFunction

Function = TypeVar("Function", TrainFunction, EvaluateFunction)
Work: TypeAlias = Callable[[fleet_pb2.Assignment], assignment.CheckInResult]
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
        labels: what jobs may select by, such as `{"region": "eu"}`.
        data_dir: where identity and models are kept; by default the platform's folder for user data. Two clients
            on one machine need two of them.
        options: times and sizes.
        ticket: what an operator gave; needed until the client has enrolled.
    """

    def __init__(
        self,
        server: str,
        *,
        population: str,
        labels: Mapping[str, str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        options: ClientOptions | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        self._server = server
        self._ticket = ticket
        self._population = population
        self._labels = _checked_labels(labels or {})
        self._directory = identity.DataDirectory(_folder(data_dir), server, population)
        self._options = options or ClientOptions()
        self._trainers: dict[str, TrainFunction] = {}
        self._evaluators: dict[str, EvaluateFunction] = {}
        self._stop = cancellation.StopSignal()

    @classmethod
    def from_ticket(
        cls,
        ticket: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        options: ClientOptions | None = None,
    ) -> Client:
        """A client of the server and the population that a ticket names.

        Without `ticket` the environment is asked (FEDPLAT_TICKET, or a file named by FEDPLAT_TICKET_FILE), and then
        the data directory: a client that has enrolled needs no ticket. Raises `TicketError` or `DataDirectoryError`.
        """
        read = tickets.find(ticket)
        if read is None:
            known = identity.find_identity(_folder(data_dir))
            server, population = known.server, known.population
        else:
            server, population = read.server, read.population
        return cls(server, population=population, labels=labels, data_dir=data_dir, options=options, ticket=read)

    def trainer(self, name: str) -> Callable[[TrainFunction], TrainFunction]:
        """Decorates the function that trains for jobs whose trainer is `name`."""
        return lambda function: self.add_trainer(name, function)

    def evaluator(self, name: str) -> Callable[[EvaluateFunction], EvaluateFunction]:
        """Decorates the function that evaluates for jobs whose evaluator is `name`."""
        return lambda function: self.add_evaluator(name, function)

    def add_trainer(self, name: str, function: TrainFunction) -> TrainFunction:
        """Installs a trainer and returns it. Raises `ValueError` when the name is taken."""
        return _install(self._trainers, "trainer", name, function)

    def add_evaluator(self, name: str, function: EvaluateFunction) -> EvaluateFunction:
        """Installs an evaluator and returns it. Raises `ValueError` when the name is taken."""
        return _install(self._evaluators, "evaluator", name, function)

    def stop(self) -> None:
        """Makes `run` return soon, for good; callable from any thread and at any time.

        A trainer that is running gets `Cancelled` from its next `task.progress`.
        """
        self._stop.set(assignment.client_stopped())

    def run(self, max_tasks: int | None = None) -> None:
        """Works until `stop`, SIGINT or SIGTERM, or until `max_tasks` assignments have ended, well or badly.

        In a process that another one leads (`TorchTrainer(parallel="data")` under torchrun) it joins that one's
        trainings until it ends. Unreachable servers are waited for, however long. Raises `IncompatibleServerError`,
        `EnrollmentError`, `IdentityError` (the client was revoked, or its identity runs elsewhere too) and
        `DataDirectoryError`, which waiting does not mend.
        """
        if not (self._trainers or self._evaluators):
            raise ValueError("the client has no trainer and no evaluator; add one with @client.trainer(name)")
        if max_tasks is not None and max_tasks < 0:
            raise ValueError(f"max_tasks is {max_tasks}; expected 0 or more, or None for no limit")
        if process_group.run_follower(self._trainers):
            return
        with process_group.lead(), self._start_work() as (session, work):
            backoff = Backoff(self._options)
            num_tasks = 0
            delay_s = 0.0
            again = False  # whether the client has enrolled again since something last went well
            while num_tasks != max_tasks and not self._stopped_within(delay_s):
                try:
                    session.enroll()
                    reply = session.check_in(self._options.check_in_wait_s)
                    if reply.HasField("assignment"):
                        num_tasks += 1
                        outcome = work(reply.assignment)
                    else:
                        outcome = _read_refusal(reply)
                    again = again and outcome.failed
                    delay_s = self._delay_s(outcome, backoff)
                except Cancelled:
                    return
                except UnknownClientError as exc:
                    session.forget_enrollment()
                    delay_s = backoff.next_s() if again else 0.0
                    again = True
                    _logger.warning("The server does not know this client any more: %s", exc, extra=self._fields)
                except (IncompatibleServerError, IdentityError):
                    raise
                except CallError as exc:
                    delay_s = backoff.next_s(exc.retry)
                    fields = {**self._fields, "retry_s": round(delay_s, 3)}
                    _logger.warning("The server cannot be used: %s", session.explain_error(exc), extra=fields)

    @contextlib.contextmanager
    def _start_work(self) -> Generator[tuple[ClientSession, Work]]:
        with self._directory.lock(), cancellation.on_signals(self.stop), contextlib.ExitStack() as stack:
            known = self._directory.identity(self._ticket)
            key = self._directory.signing_key(known)
            channel = stack.enter_context(transport.connect(self._server, tls=known.tls, ca=known.ca))
            access = SignedAccess(channel, key, self._options.call_timeout_s)
            shown = stack.enter_context(self._certificates(access, known)) if self._options.mtls else access
            calls = Connection(shown, self._options.call_timeout_s)
            profile = ClientDescription(
                ticket=self._ticket,
                population=self._population,
                labels=self._labels,
                trainers=sorted(self._trainers),
                evaluators=sorted(self._evaluators),
            )
            try:
                cache = ModelCache(self._directory.models, self._options.cache_limit_bytes)
            except OSError as exc:
                raise DataDirectoryError(
                    f"{self._directory.models} cannot be used: {exc}; free space or make it writable"
                ) from exc
            hand = assignment.AssignmentWorker(
                connection=calls,
                cache=cache,
                residuals=Residuals(self._directory.residuals, self._options.cache_limit_bytes),
                client_states=ClientStateStore(self._directory.memories, self._options.cache_limit_bytes),
                ledger=PrivacyLedger(self._directory.privacy, f"{self._server} {self._population}"),
                trainers=self._trainers,
                evaluators=self._evaluators,
                options=self._options,
                stop=self._stop,
            )
            yield ClientSession(Endpoints(access, calls), self._directory, known, profile, self._stop), hand.work

    def _certificates(self, access: SignedAccess, known: identity.Identity) -> CertificateAccess:
        return CertificateAccess(access, self._directory, known, self._options.call_timeout_s, self._options.clock)

    def _stopped_within(self, delay_s: float) -> bool:
        return self._options.wait(self._stop, delay_s) if delay_s > 0 else self._stop.is_set()

    def _delay_s(self, outcome: assignment.CheckInResult, backoff: Backoff) -> float:
        if not outcome.failed:
            backoff.reset()
        if outcome.retry is not None:
            return draw_s(outcome.retry, self._options.rng)
        return backoff.next_s() if outcome.failed else 0.0

    @property
    def _fields(self) -> dict[str, object]:
        return {"server": self._server, "population": self._population}


def _folder(data_dir: str | os.PathLike[str] | None) -> Path:
    return Path(data_dir).expanduser() if data_dir is not None else identity.default_data_dir()


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not key or type(key) is not str or type(value) is not str:
            raise ValueError(f"the label {key!r} is {value!r}; expected text for both, such as {{'memory_mb': '4096'}}")
    return dict(labels)


def _read_refusal(reply: fleet_pb2.CheckInResponse) -> assignment.CheckInResult:
    """A check-in without work; a server that names no retry window gets the back-off."""
    refusal = reply.refusal
    _logger.debug("There is no work: %s", refusal.text, extra={"reason": cancellation.reason_name(refusal.reason)})
    if refusal.HasField("retry"):
        return assignment.CheckInResult(failed=False, retry=refusal.retry)
    return assignment.CheckInResult(failed=True)


def _install(table: dict[str, Function], kind: str, name: str, function: Function) -> Function:
    if not name or not callable(function):
        raise ValueError(f"a {kind} needs a name and a function; got {name!r} and {function!r}")
    if name in table:
        raise ValueError(f"there is a {kind} {name!r} already; names must be unique")
    table[name] = function
    return function
