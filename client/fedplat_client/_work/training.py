"""Run the trainers and evaluators of the client's owner: find one, get its model and client state, call it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from fedplat.client_state import ClientState
from fedplat.errors import FedplatError, ModelError, PrivacyLimitError
from fedplat.model import Parameters
from fedplat.plugins import BUILTIN, Plugins
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._auth.calls import Connection
from fedplat_client._state.client_state import ClientStateStore
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client._state.two_phase import SentReport, WasMerged
from fedplat_client._work.model_download import DownloadedModel, Downloader
from fedplat_client._work.outcomes import AssignmentFailedError
from fedplat_client.errors import ServerUnavailableError, TransferError
from fedplat_client.options import ClientOptions
from fedplat_client.task import Control, EvaluateFunction, EvaluateResult, Scalar, Task, TrainFunction, TrainResult

_logger = logging.getLogger(__name__)

Function = TypeVar("Function", TrainFunction, EvaluateFunction)
Result = TypeVar("Result", TrainResult, EvaluateResult)
Update = TypeVar("Update")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The owner's functions, and what they need. Methods raise `AssignmentFailedError`, and `Cancelled`."""

    connection: Connection
    cache: ModelCache
    client_states: ClientStateStore
    ledger: PrivacyLedger
    trainers: Mapping[str, TrainFunction]
    evaluators: Mapping[str, EvaluateFunction]
    options: ClientOptions
    plugins: Plugins = BUILTIN

    def find_trainer(self, name: str) -> Callable[[Task], TrainResult]:
        """Return the trainer with this name; its errors fail the assignment."""
        trainer = _find(self.trainers, "trainer", name)
        return lambda task: _call(trainer, task, TrainResult)

    def find_evaluator(self, name: str) -> Callable[[Task], EvaluateResult]:
        """Return the evaluator with this name; its errors fail the assignment."""
        evaluator = _find(self.evaluators, "evaluator", name)
        return lambda task: _call(evaluator, task, EvaluateResult)

    def make_task(
        self, assignment: fleet_pb2.Assignment, working: Parameters, client_state: ClientState, control: Control
    ) -> Task:
        """Return the task of an assignment, which may change `working`."""
        return Task(
            name=assignment.trainer,
            parameters=working,
            config={name: _scalar(value) for name, value in assignment.config.items()},
            job_id=assignment.job_id,
            job_name=assignment.job_name,
            round=assignment.round,
            attempt=assignment.attempt,
            client_state=client_state,
            ledger=self.ledger,
            plugins=self.plugins,
            control=control,
        )

    def get_model(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Return the model of an assignment."""
        try:
            return Downloader(self.connection, self.cache, self.options.max_model_bytes, self.plugins).get(
                assignment, control
            )
        except (TransferError, ModelError, OSError) as exc:
            control.signal.check()
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the model could not be loaded: {exc}"
            ) from exc

    def open_client_state(self, job_id: str, merged: WasMerged, *, training: bool) -> ClientState:
        """Return the client state of a job; its files are unchanged until `merged` tells which is valid."""
        try:
            return self.client_states.open(job_id, merged, training=training)
        except ServerUnavailableError as exc:
            raise AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED,
                f"the server did not report whether it has merged the last update, and so which client state is valid: "
                f"{exc}",
            ) from exc

    def stage_client_state(self, job_id: str, report: SentReport, client_state: ClientState) -> None:
        """Store the client state; it becomes the job's state if the update is merged."""
        problem = "it exceeds cache_limit_bytes"
        try:
            if self.client_states.stage(job_id, report, client_state):
                return
        except (OSError, ModelError) as exc:
            problem = str(exc)
        raise AssignmentFailedError(
            model_pb2.REASON_TRAINER_ERROR, f"the client state of the job cannot be stored: {problem}"
        )


def fit_model(convert: Callable[[], Update]) -> Update:
    """Return the update of a trainer's result; fail the assignment if it does not fit the model."""
    try:
        return convert()
    except ModelError as exc:
        raise AssignmentFailedError(
            model_pb2.REASON_TRAINER_ERROR, f"the trainer's result does not fit the model: {exc}"
        ) from exc


def _find(functions: Mapping[str, Function], kind: str, name: str) -> Function:
    if name not in functions:
        available = ", ".join(sorted(functions)) or "none"
        raise AssignmentFailedError(
            model_pb2.REASON_UNKNOWN_TRAINER, f"the client has no {kind} {name!r}; available: {available}"
        )
    return functions[name]


def _call(function: Callable[[Task], Result], task: Task, expected: type[Result]) -> Result:
    """Call code of the client's owner; any exception from it fails the assignment."""
    try:
        result = cast(object, function(task))
        if not isinstance(result, expected):
            raise TypeError(f"{task.name!r} returned {type(result).__name__}; expected {expected.__name__}")
    except Exception as exc:
        task.control.signal.check()  # after a stop, whatever the trainer raised counts as the stop
        if not isinstance(exc, FedplatError):  # the message of a fedplat error needs no traceback
            _logger.exception("The trainer %r raised an error.", task.name)
        limited = isinstance(exc, PrivacyLimitError)
        reason = model_pb2.REASON_PRIVACY_LIMIT if limited else model_pb2.REASON_TRAINER_ERROR
        raise AssignmentFailedError(reason, str(exc) if limited else f"{type(exc).__name__}: {exc}") from exc
    task.control.signal.check()
    return result


def read_config(assignment: fleet_pb2.Assignment) -> dict[str, Scalar]:
    """Return the hyper-parameters of an assignment."""
    return {name: _scalar(value) for name, value in assignment.config.items()}


def _scalar(value: model_pb2.Value) -> Scalar:
    kind = value.WhichOneof("kind")
    return getattr(value, kind) if kind else ""
