"""A client's part in a secure aggregation: the steps of the protocol as calls to the server.

`fedplat.secure_aggregation.participant` has the protocol and its checks, and `encoding` turns the update into integers.
All secrets are in the memory of this process only: a client that is restarted in between drops out of the attempt.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Mapping
from typing import TypeAlias

from fedplat.client_state import ClientState
from fedplat.errors import SecureAggregationError
from fedplat.model import Parameters
from fedplat.model.turns import Turn
from fedplat.procedures.sums import Integers, ReplySchema
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.participant import Participant
from fedplat.secure_aggregation.setup import AnySetup, ExactSetup, Setup, digest_task
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._state.released import Protection
from fedplat_client._state.two_phase import ServedAttempts
from fedplat_client._work import heartbeat, training
from fedplat_client._work.content import Content
from fedplat_client._work.work import AssignedWork
from fedplat_client.options import ClientOptions
from fedplat_client.task import Scalar, TrainResult

_MAX_SETUP_BYTES = 65_536

ReadSetup: TypeAlias = Callable[[bytes], AnySetup]


class SecureExchange:
    """The secure aggregation of one attempt: `encode` and `mask` before the report, `unmask` after it.

    Methods raise `AssignmentFailedError` if a message of the server must not be accepted, and `Cancelled`.
    """

    def __init__(
        self,
        setup: AnySetup,
        participant: Participant,
        served: ServedAttempts,
        calls: heartbeat.StepCalls,
        turn: Turn,
    ) -> None:
        self._setup = setup
        self.turn = turn
        self._participant = participant
        self._served = served
        self._calls = calls
        self._vector: encoding.Words | None = None

    @property
    def protection(self) -> Protection:
        """The masks and the noise that hide the update, by the setup that the client has accepted."""
        return Protection(True, self._setup.minimum, _find_noise(self._setup))

    def check_model(self, model: Parameters) -> None:
        """Check that the setup is for the update of this model, before the training."""
        assert isinstance(self._setup, Setup)
        size, expected = self._setup.encoding.size, self.turn.select_uploaded(model.schema).num_floating
        if size != expected:
            raise heartbeat.AssignmentFailedError(
                model_pb2.REASON_UNSAFE_AGGREGATION,
                f"the secure aggregation is for {size} entries; the update has {expected} floating-point entries",
            )

    def encode(self, update: Parameters, result: TrainResult) -> None:
        """Encode an update with its weight and metrics; only this vector is kept of it, and only until it is masked."""
        assert isinstance(self._setup, Setup)
        try:
            self._vector = encoding.encode(
                self._setup.encoding, update.to_vector(), result.num_examples, result.metrics, os.urandom
            )
        except SecureAggregationError as exc:
            raise heartbeat.AssignmentFailedError(
                model_pb2.REASON_TRAINER_ERROR, f"the trainer's result cannot be encoded: {exc}"
            ) from exc

    def check_schema(self, schema: ReplySchema) -> None:
        """Check that the setup is for replies of this form, before the table is read."""
        if self._setup.encoding != schema.encoding(self._setup.encoding.max_clients):
            raise heartbeat.AssignmentFailedError(
                model_pb2.REASON_UNSAFE_AGGREGATION,
                "the secure aggregation is for replies of another size or other bounds than those of the procedure",
            )

    def encode_reply(self, reply: Integers) -> None:
        """Keep the words of a reply until they are masked."""
        assert isinstance(self._setup, ExactSetup)
        self._vector = encoding.encode_exact(self._setup.encoding, reply)

    def mask(self) -> Content:
        """Exchange keys and shares with the other clients, and return the file with the masked vector.

        The attempt is recorded before the first message, so that the client never takes part in it again.
        """
        vector, self._vector = self._vector, None
        assert vector is not None
        _require_first(self._setup, self._served.add)
        with _unsafe_messages():
            _, roster = self._send({"roster"}, keys=self._participant.advertise())
            _, held = self._send({"shares"}, shares=self._participant.share(roster))
            self._participant.mask(held, vector)
        return Content(tuple(memoryview(part) for part in encoding.write_file(self._setup, vector)))

    def unmask(self) -> None:
        """Wait for the survivors, and send the shares that remove the masks from their sum."""
        # The deadline so far was that of the upload; the other clients have the time until then, and that of the step.
        control = self._calls.control
        control.adjust(max(control.remaining_s, 0.0) + self._setup.options.step_s, uploading=False)
        with _unsafe_messages():
            kind, content = self._send({"survivors", "unmask", "done"})
            if kind == "survivors":
                kind, content = self._send({"unmask", "done"}, confirmation=self._participant.confirm(content))
            if kind == "unmask":  # else the answers of other clients were enough
                self._send({"done"}, answer=self._participant.answer(content))

    def _send(self, expected: Collection[str], **message: bytes) -> tuple[str, bytes]:
        """Send the message of a step until the server has the input of the next one; return its kind and content."""
        control = self._calls.control
        content = fleet_pb2.SecureMessage(**message)  # type: ignore[arg-type]
        request = fleet_pb2.StepRequest(wait_s=control.options.check_in_wait_s, secure=content)
        while (response := self._calls.take(request, _is_input)).HasField("waiting"):
            # The upload time that is added is the time for a server that restarts at the end of the step.
            control.adjust(response.waiting.remaining_s, uploading=False)
        kind = response.secure.WhichOneof("input") or response.WhichOneof("outcome")
        if kind is None or kind not in expected:
            raise SecureAggregationError(
                f"the server answered a step of the secure aggregation with {kind or 'nothing'}; "
                f"expected {' or '.join(sorted(expected))}"
            )
        return kind, b"" if kind == "done" else getattr(response.secure, kind)


def _is_input(response: fleet_pb2.StepResponse) -> bool:
    return not response.HasField("waiting")


def train(work: AssignedWork) -> heartbeat.CheckInResult:
    """Train, send the masked update, report it, and help to remove the masks from the sum."""
    exchange = open_exchange(work, Setup.from_bytes, training.read_config(work.assignment))
    request = fleet_pb2.ReportRequest(token=work.assignment.token, num_examples=1)  # the number of examples is masked
    with work.heartbeat():
        client_state = _encode(work, exchange)
        work.control.trained = True
        with work.span("share"):
            content = exchange.mask()
        work.send(request, content, client_state, exchange.protection)
    work.control.signal.check()
    outcome = work.report(request, content)
    del request, content  # the update is at the server; the other clients may take long
    return finish(work, outcome, exchange)


def finish(work: AssignedWork, outcome: heartbeat.CheckInResult, exchange: SecureExchange) -> heartbeat.CheckInResult:
    """Help to remove the masks from the sum, if the report was accepted. The caller keeps nothing that was masked."""
    if not outcome.failed:
        with work.span("unmask"), work.stoppable():
            exchange.unmask()
    return outcome


def _encode(work: AssignedWork, exchange: SecureExchange) -> ClientState:
    """Run the trainer. The exchange has the update then, and the copies of the model are freed when this returns."""
    trained = work.run(work.parts.trainers.find_trainer(work.assignment.trainer), "train", exchange.check_model)
    turn = exchange.turn
    update = training.fit_model(work.control, lambda: turn.leave_out(trained.result.to_update(trained.base)))
    exchange.encode(update, trained.result)
    return trained.client_state


def open_exchange(work: AssignedWork, read: ReadSetup, config: Mapping[str, Scalar]) -> SecureExchange:
    """Return the client's part in the secure aggregation of an attempt, whose setup `read` decodes.

    `config` is what the setup has to name as that of all clients.

    Raises `AssignmentFailedError` if the client's owner does not allow the assignment, or if the client has sent keys
    for this attempt before.
    """
    assignment, parts = work.assignment, work.parts
    options, key = work.options, parts.key
    with _unsafe_messages():
        setup = _read_setup(assignment, config, read)
        _check_limits(setup, options)
        participant = Participant(setup, key.public, key.sign, options.secure_limits(key.public))
    _require_first(setup, parts.served.is_new)
    calls = heartbeat.StepCalls(parts.connection, assignment.token, work.control)
    return SecureExchange(setup, participant, parts.served, calls, training.read_turn(assignment))


def _require_first(setup: AnySetup, is_first: Callable[[str, int, int], bool]) -> None:
    """Raise `AssignmentFailedError` unless the client takes part in an attempt for the first time.

    With other secrets, the server would get a second sum; and those of the first time are lost.
    """
    try:
        if is_first(setup.job_id, setup.round, setup.attempt):
            return
    except OSError as exc:
        raise heartbeat.AssignmentFailedError(
            model_pb2.REASON_UNSAFE_AGGREGATION, f"the client cannot record the attempts that it takes part in: {exc}"
        ) from exc
    raise heartbeat.AssignmentFailedError(
        model_pb2.REASON_KEYS_LOST,
        f"the client has sent its keys for attempt {setup.attempt} of round {setup.round} before, and takes part in an "
        "attempt once",
    )


def _read_setup(assignment: fleet_pb2.Assignment, config: Mapping[str, Scalar], read: ReadSetup) -> AnySetup:
    """Decode the setup of an assignment, and check that it is for the assignment."""
    if len(assignment.secure_setup) > _MAX_SETUP_BYTES:
        raise SecureAggregationError(
            f"the setup of the secure aggregation has {len(assignment.secure_setup)} bytes; "
            f"expected at most {_MAX_SETUP_BYTES}"
        )
    setup = read(assignment.secure_setup)
    for name, value, expected in (
        ("job", setup.job_id, assignment.job_id),
        ("round", setup.round, assignment.round),
        ("attempt", setup.attempt, assignment.attempt),
        ("model digest", setup.model_digest, assignment.model.digest),
        ("task digest", setup.task_digest, digest_task(assignment.trainer, assignment.job_name, config)),
    ):
        if value != expected:
            raise SecureAggregationError(
                f"the secure aggregation is for the {name} {value!r}; the assignment is for {expected!r}"
            )
    if isinstance(setup, Setup):
        _check_encoding(setup)
    return setup


def _find_noise(setup: AnySetup) -> float:
    """Return the noise multiplier of the smallest sum: 0 if clients add none."""
    return setup.encoding.noise_multiplier(setup.minimum) if isinstance(setup, Setup) else 0.0


def _check_limits(setup: AnySetup, options: ClientOptions) -> None:
    """Check a setup against the limits of the client's owner that are not those of `Participant`."""
    if setup.minimum < options.min_secure_clients:
        raise SecureAggregationError(
            f"the job unmasks sums of {setup.minimum} clients; the owner of this client requires at least "
            f"{options.min_secure_clients}: raise min_fraction or the goal in [selection]"
        )
    if options.requires_noise and not (isinstance(setup, Setup) and setup.encoding.noise is not None):
        raise SecureAggregationError(
            "the owner of this client allows only updates to which the client adds noise; "
            'the job needs [privacy] trust = "none"'
        )
    multiplier = _find_noise(setup)
    if multiplier < options.min_local_noise_multiplier:
        raise SecureAggregationError(
            f"the noise multiplier of a sum of {setup.minimum} clients is {multiplier:.4g}; the owner of this client "
            f"requires at least {options.min_local_noise_multiplier:g}: lower epsilon in [privacy]"
        )


def _check_encoding(setup: Setup) -> None:
    """Check that the client encodes its update as the job's options say.

    With noise the metrics are those of `[privacy.metrics]`, which have noise of their own, and the options have none.
    """
    options, encoding_ = setup.options, setup.encoding
    stated = tuple((name, *options.metrics[name]) for name in sorted(options.metrics))
    found = encoding_.metrics if encoding_.noise is None else ()
    if (encoding_.bits, encoding_.modulus, found) != (options.bits, options.modulus, stated):
        raise SecureAggregationError("the encoding of the secure aggregation does not have the job's options")


@contextlib.contextmanager
def _unsafe_messages() -> Generator[None]:
    """Translate the refusal of a server's message into the failure of the assignment."""
    try:
        yield
    except SecureAggregationError as exc:
        raise heartbeat.AssignmentFailedError(model_pb2.REASON_UNSAFE_AGGREGATION, str(exc)) from exc
