"""The trainers and evaluators of the client's owner, how they are called, and the encoding of their updates."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from fedplat import codecs, errors, forks, texts
from fedplat.client_state import ClientState
from fedplat.codecs.container import Format, options_from_text
from fedplat.config import user_code
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.model import Parameters, Values
from fedplat.model.turns import Turn
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client._state.two_phase import ClientStateStore, Residuals, SentReport, WasMerged
from fedplat_client._work import heartbeat
from fedplat_client._work.content import Content
from fedplat_client._work.heartbeat import AssignmentFailedError
from fedplat_client.errors import CallError, ServerUnavailableError, TaskLeftError
from fedplat_client.options import check_text
from fedplat_client.task import Control, EvaluateFunction, EvaluateResult, Scalar, Task, TrainFunction, TrainResult

_logger = logging.getLogger(__name__)
Function = TypeVar("Function", TrainFunction, EvaluateFunction)
Result = TypeVar("Result", TrainResult, EvaluateResult)
Update = TypeVar("Update")


@dataclass(frozen=True, kw_only=True)
class LocalTrainers:
    """What assignments may run."""

    trainers: Mapping[str, TrainFunction]
    evaluators: Mapping[str, EvaluateFunction]
    ledger: PrivacyLedger
    plugins: Plugins = BUILTIN

    def find_trainer(self, name: str) -> Callable[[Task], TrainResult]:
        """Return a trainer. Raises `AssignmentFailedError` if the client has no such trainer; so does the trainer."""
        trainer = _find(self.trainers, "trainer", name)
        return lambda task: _call(trainer, task, TrainResult)

    def find_evaluator(self, name: str) -> Callable[[Task], EvaluateResult]:
        """Return an evaluator; see `find_trainer`."""
        evaluator = _find(self.evaluators, "evaluator", name)
        return lambda task: _call(evaluator, task, EvaluateResult)

    def make_task(
        self, assignment: fleet_pb2.Assignment, parameters: Parameters, client_state: ClientState, control: Control
    ) -> Task:
        """Return the task of an assignment; its function may change the parameters."""
        return Task(
            name=assignment.trainer,
            parameters=parameters,
            config=read_config(assignment),
            job_id=assignment.job_id,
            job_name=assignment.job_name,
            round=assignment.round,
            attempt=assignment.attempt,
            assignment_id=_identify(assignment),
            num_rounds=assignment.num_rounds,
            client_state=client_state,
            ledger=self.ledger,
            plugins=self.plugins,
            control=control,
        )


@contextlib.contextmanager
def guard(control: Control, problem: str = "") -> Generator[None]:
    """Fail the assignment for whatever the block raises; `problem` is the beginning of the text.

    It is for each block that runs code of the client's owner, or reads what that code returned, since its types and
    plugins may raise anything: no client ends because of them. If the task is stopped, that counts instead. Errors of
    calls to the server pass, a task that is left, and Ctrl-C, but not a KeyboardInterrupt that the code raises. A child
    that the code has forked, and that comes back here, ends.
    """
    owner = os.getpid()
    try:
        yield
        forks.end_child(owner)
    except BaseException as exc:
        forks.end_child(owner, exc)
        if user_code.is_interrupt(exc) or isinstance(exc, AssignmentFailedError | CallError | TaskLeftError):
            raise
        control.signal.check()
        if not isinstance(exc, errors.FedplatError):  # the message of a fedplat error needs no traceback
            # Not as `exc_info`: a handler of the owner's that writes UTF-8 would fail on texts in another encoding.
            trace = texts.repair("".join(traceback.format_exception(exc)))
            _logger.error("%s.\n%s", problem.capitalize() or "The trainer raised an error", trace.rstrip())
        if isinstance(exc, errors.PrivacyLimitError):
            raise AssignmentFailedError(model_pb2.REASON_PRIVACY_LIMIT, str(exc)) from exc
        text = texts.repair(str(exc)) if problem and isinstance(exc, errors.FedplatError) else texts.describe(exc)
        text = f"{problem}: {text}" if problem else text
        raise AssignmentFailedError(model_pb2.REASON_TRAINER_ERROR, text) from exc


def fit_model(control: Control, convert: Callable[[], Update]) -> Update:
    """Convert a trainer's result. Raises `AssignmentFailedError` if it cannot be read or does not fit the model."""
    with guard(control, "the trainer's result does not fit the model"):
        return convert()


def stage_client_state(
    store: ClientStateStore, job_id: str, sent: SentReport, client_state: ClientState, control: Control
) -> None:
    """Store the client state of a training; it becomes the job's if `sent` counts. Raises `AssignmentFailedError`."""
    problem = "the client state of the job cannot be stored"
    with guard(control, problem):
        if not store.stage(job_id, sent, client_state):
            raise AssignmentFailedError(
                model_pb2.REASON_TRAINER_ERROR, f"{problem}: it exceeds cache_limit_bytes, which can be raised"
            )


def register(table: dict[str, Function], kind: str, name: str, function: Function) -> Function:
    """Add a function to a table and return it. Raises `ValueError` if the name is taken."""
    if not name or not callable(function):
        raise ValueError(f"a {kind} needs a name and a function; got {name!r} and {function!r}")
    if name in table:
        raise ValueError(f"a {kind} {name!r} exists already; names must be unique")
    table[check_text(f"the name of the {kind}", name)] = function
    return function


def _find(functions: Mapping[str, Function], kind: str, name: str) -> Function:
    if name not in functions:
        available = ", ".join(sorted(functions)) or "none"
        raise AssignmentFailedError(
            model_pb2.REASON_UNKNOWN_TRAINER, f"the client has no {kind} {name!r}; available: {available}"
        )
    return functions[name]


def _call(function: Callable[[Task], Result], task: Task, expected: type[Result]) -> Result:
    """Call code of the client's owner; any exception from it fails the assignment."""
    with guard(task.control):
        result = cast(object, function(task))
        if not isinstance(result, expected):
            raise TypeError(f"{task.name!r} returned {type(result).__name__}; expected {expected.__name__}")
    task.control.signal.check()  # after a stop, the result does not count
    return result


def _identify(assignment: fleet_pb2.Assignment) -> str:
    """Return what is the same for an assignment that the server gives again, which has another token, and no other."""
    config = sorted(read_config(assignment).items())
    parts = (assignment.job_id, assignment.round, assignment.attempt, assignment.model.digest, config)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def read_config(assignment: fleet_pb2.Assignment) -> dict[str, Scalar]:
    """Return the hyper-parameters of an assignment."""
    return {name: _scalar(value) for name, value in assignment.config.items()}


def _scalar(value: model_pb2.Value) -> Scalar:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind else ""


def read_turn(assignment: fleet_pb2.Assignment) -> Turn:
    """Return which tensors the update of an assignment leaves out, since they rest in its round."""
    alternate = read_config(assignment).get("alternate") if assignment.leaves_out_resting else None
    return Turn.of(alternate, assignment.round) if isinstance(alternate, str) else Turn()


def read_codec(assignment: fleet_pb2.Assignment, plugins: Plugins) -> codecs.CodecOptions | None:
    """Return the codec of an assignment, or None. Raises `AssignmentFailedError` if the client does not support it."""
    try:
        return options_from_text(assignment.uplink, plugins) if assignment.uplink else None
    except errors.CodecError as exc:
        raise heartbeat.AssignmentFailedError(model_pb2.REASON_UNKNOWN_CODEC, str(exc)) from exc


def encode(
    assignment: fleet_pb2.Assignment, update: Values, format: Format, seed: int, residuals: Residuals, merged: WasMerged
) -> Content:
    """Return the encoded file of an update.

    `seed` seeds the codec's randomness. If the residual cannot be read or stored, encode without feedback. Raises
    `CodecError` if the update cannot be encoded, and the errors of `merged`.
    """
    is_residual_broken = False
    if format.needs_feedback:
        try:
            content = _encode_with_feedback(assignment, update, format, seed, residuals, merged)
            if content is not None:
                return content
            _logger.warning("The codec's residual exceeds cache_limit_bytes; encoding without error feedback.")
        except OSError as exc:
            _logger.warning("The codec's residual cannot be stored: %s", exc)
        except errors.CodecError:
            is_residual_broken = True
    content = Content.merge_parts(format.encode(update, np.random.default_rng(seed)))
    if is_residual_broken:  # the update alone can be encoded, so the residual is the cause
        residuals.forget(assignment.job_id)
    return content


def _encode_with_feedback(
    assignment: fleet_pb2.Assignment, update: Values, format: Format, seed: int, residuals: Residuals, merged: WasMerged
) -> Content | None:
    """Return None if the new residual exceeds the size limit; the stored residual then stays."""
    size, name = format.schema.num_floating, hashlib.sha256(format.prefix).hexdigest()
    residual = residuals.load(assignment.job_id, name, size, _or_unknown(merged))
    pieces, left_out = format.encode_with_feedback(update, residual, np.random.default_rng(seed))
    content = Content.merge_parts(pieces)
    sent = SentReport(assignment.token, content.digest)
    return content if residuals.stage(assignment.job_id, name, sent, left_out) else None


def _or_unknown(merged: WasMerged) -> WasMerged:
    """Count an update as not merged if the server does not answer: a lost residual only slows a codec down."""

    def was_merged(sent: SentReport) -> bool:
        try:
            return merged(sent)
        except ServerUnavailableError:
            return False

    return was_merged
