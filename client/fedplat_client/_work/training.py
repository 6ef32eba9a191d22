"""The trainers and evaluators of the client's owner, and how they are called."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from fedplat import errors, forks, texts
from fedplat.client_state import ClientState
from fedplat.config import user_code
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client._state.two_phase import ClientStateStore, SentReport
from fedplat_client._work.failures import AssignmentFailedError
from fedplat_client.errors import CallError
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
    calls to the server pass, and so does Ctrl-C, but not a KeyboardInterrupt that the code raises by itself. A child
    that the code has forked, and that comes back here, ends.
    """
    owner = os.getpid()
    try:
        yield
        forks.end_child(owner)
    except BaseException as exc:
        forks.end_child(owner, exc)
        if user_code.is_interrupt(exc) or isinstance(exc, AssignmentFailedError | CallError):
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


def read_config(assignment: fleet_pb2.Assignment) -> dict[str, Scalar]:
    """Return the hyper-parameters of an assignment."""
    return {name: _scalar(value) for name, value in assignment.config.items()}


def _scalar(value: model_pb2.Value) -> Scalar:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind else ""
