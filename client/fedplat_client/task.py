"""The interface of trainers and evaluators: the task they receive and the results they return."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from fedplat import claims, errors, texts
from fedplat.client_state import ClientState
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.model import SERVER, Difference, Parameters, Schema
from fedplat.wire.v1 import model_pb2
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client.cancellation import Stop, StopSignal
from fedplat_client.options import ClientOptions

Scalar: TypeAlias = bool | int | float | str
_MAX_SHOWN_BYTES = 200
Arrays: TypeAlias = Mapping[str, Any]
"""Arrays, or tensors of PyTorch, by name."""
_LATE = frozenset({model_pb2.REASON_TRAIN_TIMEOUT, model_pb2.REASON_UNREACHABLE})
"""The server's reasons to continue without a silo that may still be training."""


@runtime_checkable
class _Module(Protocol):
    """An `nn.Module`, which this module need not import."""

    def state_dict(self) -> Arrays: ...


@dataclass
class Control:
    """State shared by the threads of one assignment: its deadlines, its progress and the stop signal.

    Deadlines are times of the client's monotonic clock. They count from construction at first; each heartbeat's answer
    sets them again (`adjust`), since a restarted server may have other ones.
    """

    training_timeout_s: float = math.inf
    upload_timeout_s: float = 0.0
    options: ClientOptions = field(default_factory=ClientOptions)
    signal: StopSignal = field(default_factory=StopSignal)
    fraction: float = 0.0
    """The completed fraction of the training, 0 to 1."""
    trained: bool = False
    """True if training has ended and the upload has begun."""
    may_be_late: bool = False
    """Whether the training continues after its deadline: a silo's model counts in the next round, too."""
    is_given_back: bool = False
    """True if the server knows that the client has given up the task, although its trainer may still run."""
    is_late: bool = False
    """True if the server continues without the result of a training that continues."""

    def __post_init__(self) -> None:
        self._training_deadline_at = self.options.clock() + self.training_timeout_s
        self._deadline_at = self._training_deadline_at + self.upload_timeout_s

    @property
    def is_time_up(self) -> bool:
        """True if the deadline of the training has passed, and ends it."""
        return self.training_remaining_s <= 0 and not self.may_be_late

    def handle_stop(self, stop: Stop) -> None:
        """Stop the task as the server orders.

        A training that may be late continues if the server only continues without it. What follows such a training is
        not stopped: the silo learns from its next step whether the server still expects one.
        """
        if self.may_be_late and stop.reason in _LATE:
            self.is_late = True
        elif not (self.may_be_late and self.trained):
            self.signal.set(stop)

    def adjust(self, remaining_s: float, *, uploading: bool) -> None:
        """Set the server's deadline, whether it is earlier or later than the current one.

        `uploading`: the server is already receiving the update, so no upload time is added.
        """
        if math.isfinite(remaining_s):
            self._training_deadline_at = self.options.clock() + remaining_s
            self._deadline_at = self._training_deadline_at + (0.0 if uploading else self.upload_timeout_s)

    @property
    def training_remaining_s(self) -> float:
        """Seconds until the training must be over; negative afterwards."""
        return self._training_deadline_at - self.options.clock()

    @property
    def remaining_s(self) -> float:
        """Seconds until the assignment is void; negative afterwards."""
        return self._deadline_at - self.options.clock()

    @property
    def call_timeout_s(self) -> float:
        """The timeout of a transfer, which gRPC limits; after the deadline it fails with DEADLINE_EXCEEDED."""
        return min(max(self.remaining_s, 0.001), 7 * 86_400.0)

    def expire(self) -> None:
        """Stop the task because its deadline has passed."""
        reason = model_pb2.REASON_UPLOAD_TIMEOUT if self.trained else model_pb2.REASON_TRAIN_TIMEOUT
        self.signal.set(Stop(reason, "the deadline of the assignment has passed"))

    def wait(self, seconds: float) -> None:
        """Wait; raise `Cancelled` if the task is stopped before or during the wait."""
        self.options.wait(self.signal, seconds)
        self.signal.check()


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One task: train, or evaluate, these parameters on this client's data.

    >>> import numpy as np
    >>> task = Task(name="digits", parameters=Parameters.from_arrays({"weight": np.ones(3, np.float32)}))
    >>> task.parameters["weight"] *= 2
    >>> task.progress(0.5)
    """

    name: str
    """Name of the trainer or evaluator."""
    parameters: Parameters
    """The model to start from; a copy that the trainer may change in place.

    After the trainer has returned, neither these nor the parameters that it returned may change until the update was
    reported: a large update is computed from them while it is sent. A trainer whose threads go on returns a copy.
    """
    config: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """The job's hyper-parameters."""
    job_id: str = ""
    job_name: str = ""
    round: int = 1
    attempt: int = 1
    assignment_id: str = ""
    """Identifies the assignment; the same if the server gives it again to a client that was restarted."""
    num_rounds: int = 0
    """The job's number of rounds, for schedules over all of them; 0 if the server is of a version before 0.2."""
    client_state: ClientState = field(default_factory=ClientState, repr=False)
    """What the trainer stores between rounds of the job; kept only if this training's update is merged."""
    ledger: PrivacyLedger = field(default_factory=PrivacyLedger, repr=False)
    """The privacy cost of single examples so far, over all jobs; for trainers with example-level privacy."""
    plugins: Plugins = field(default=BUILTIN, repr=False)
    """The plugins of the client's owner; for trainers whose job names one, such as a local algorithm."""
    control: Control = field(default_factory=Control, repr=False, compare=False)
    """The SDK's side of the task; not for trainers."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the training must be over; 0 when the time is up."""
        return max(0.0, self.control.training_remaining_s)

    @property
    def cancelled(self) -> bool:
        """True if the task must stop; the next `progress` then raises `Cancelled`."""
        return self.control.signal.is_set() or self.control.is_time_up

    def progress(self, fraction: float) -> None:
        """Set the completed fraction of the work, 0 to 1; cheap enough to call for every batch.

        Raises `Cancelled` if the server stopped the task, the client is being stopped, or the deadline has passed. Do
        not catch it: the client handles it. Raises `ValueError` for a fraction outside 0 to 1.
        """
        done = _to_float("the progress", fraction)
        if not 0.0 <= done <= 1.0:
            raise ValueError(f"the progress is {done}; expected a fraction between 0 and 1")
        self.control.fraction = done
        if self.control.is_time_up:
            self.control.expire()
        self.control.signal.check()


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainResult:
    """The result of a trainer: the trained parameters, or the change that training made (`delta`).

    Both are `Parameters`, a mapping of arrays or of PyTorch's tensors, or an `nn.Module`, with the names, shapes and
    dtypes of `task.parameters`; further names of a tied weight, which the model has once, are left out, and so are
    tensors that the server owns (`server/NAME`). Averages weight
    the client by `num_examples`. Raises `ValueError` for a number that is not usable.
    """

    parameters: Parameters | Arrays | _Module | None = None
    num_examples: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    delta: Parameters | Arrays | _Module | None = None

    def __post_init__(self) -> None:
        if (self.parameters is None) == (self.delta is None):
            given = "both" if self.parameters is not None else "neither"
            raise ValueError(f"TrainResult requires either parameters or delta; got {given}")
        object.__setattr__(self, "num_examples", _validate_count(self.num_examples))
        object.__setattr__(self, "metrics", _validate_metrics(self.metrics))

    def to_update(self, base: Parameters) -> Parameters:
        """Return the update from `base` to the result. Raises `ModelError` if it does not fit `base`."""
        if self.delta is not None:
            return _fit_schema("delta", self.delta, base.schema.uploaded)
        return _fit_schema("parameters", self.parameters, base.schema.uploaded).minus(base.uploaded)

    def to_difference(self, base: Parameters) -> Difference | None:
        """Return the update's file as one that is computed when it is read; None if the trainer returned the update.

        The result must not change until then. Raises `ModelError` if it does not fit `base`.
        """
        if self.delta is not None:
            return None
        return base.difference_to(_read_arrays("parameters", self.parameters, base.schema))

    def to_pieces(self, base: Parameters) -> tuple[memoryview, ...]:
        """Return the bytes of the update's file as pieces of memory. Raises `ModelError` if it does not fit `base`."""
        return self.to_update(base).pieces


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The result of an evaluator. Raises `ValueError` for a number that is not usable."""

    num_examples: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", _validate_count(self.num_examples))
        object.__setattr__(self, "metrics", _validate_metrics(self.metrics))


TrainFunction: TypeAlias = Callable[[Task], TrainResult]
EvaluateFunction: TypeAlias = Callable[[Task], EvaluateResult]


def _fit_schema(argument: str, values: Any, schema: Schema) -> Parameters:
    arrays = _read_arrays(argument, values, schema)
    if isinstance(arrays, Parameters) and arrays.schema == schema:
        return arrays
    parameters = Parameters.zeros(schema)  # assigned by name: the caller's order of tensors does not matter
    parameters.assign(arrays)
    return parameters


def _read_arrays(argument: str, values: Any, schema: Schema) -> Arrays:
    """Return a trainer's values by name, without further names of one tensor. Raises `ModelError` for other types."""
    if isinstance(values, Parameters) and values.schema == schema:
        return values
    if isinstance(values, _Module):
        values = values.state_dict()
    if not isinstance(values, Mapping):
        raise errors.ModelError(
            f"{argument} is a {type(values).__name__}; expected Parameters, a mapping of arrays by the names of "
            "task.parameters, a state_dict or an nn.Module"
        )
    own = {name: value for name, value in values.items() if not str(name).startswith(SERVER)}
    return _leave_out_ties(values if len(own) == len(values) else own, schema)


def _leave_out_ties(values: Arrays, schema: Schema) -> Arrays:
    """Return the values without further names of a tensor that the model has once, such as a tied weight."""
    names = {tensor.name for tensor in schema.tensors}
    further = [value for name, value in values.items() if name not in names]
    ties = _find_tied_arrays(values) if further else {}
    torch = sys.modules.get("torch")  # else there are no tensors of it
    if torch is not None and any(isinstance(value, torch.Tensor) for value in further):
        from fedplat.pytorch.convert import find_tied_names  # the light client has no PyTorch

        ties |= find_tied_names(values)
    if not ties:
        return values
    known = {ties.get(name, name) for name in values if name in names}
    return {name: value for name, value in values.items() if name in names or ties.get(name, name) not in known}


def _find_tied_arrays(values: Arrays) -> dict[str, str]:
    """Return the further names of NumPy arrays that share their memory, such as views of a tied weight, as above."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray) and value.size:
            place = (value.__array_interface__["data"][0], value.dtype.str, value.shape, value.strides)
            if (known := first.setdefault(place, name)) != name:
                ties[name] = known
    return ties


def _validate_count(count: float) -> float:
    value = _to_float("num_examples", count)
    if problem := claims.check_examples(value):
        raise ValueError(problem)
    return value


def _validate_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(cast(object, metrics), Mapping):
        raise ValueError(f"metrics is a {type(metrics).__name__}; expected a mapping of numbers by name")
    checked = {_check_name(name): _to_float(f"metric {name!r}", value) for name, value in metrics.items()}
    if problem := claims.check_metrics(checked):
        raise ValueError(problem)
    return checked


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is the name of a metric, and a {type(name).__name__}; expected text")
    return name


def _to_float(label: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # also NumPy scalars and tensors of one element
    except (TypeError, ValueError, OverflowError, RuntimeError) as exc:  # RuntimeError: a tensor of several elements
        raise ValueError(f"{label} is {_show(value)}; expected a number") from exc


def _show(value: object) -> str:
    if isinstance(value, int):
        return texts.format_number(value)
    try:
        return texts.shorten(repr(value), _MAX_SHOWN_BYTES)
    except Exception:  # the class is someone's code
        return f"a {texts.name_type(value)}"


class TaskOutcome(enum.Enum):
    """What became of the one task for which a client runs."""

    DONE = "done"
    """It was reported, or the server has ended it, since it no longer needed it."""
    NO_WORK = "no work"
    FAILED = "failed"
    """It failed here, or its report was refused; the server knows."""
    UNREACHABLE = "unreachable"
    """The server did not answer."""
    LEFT = "left"
    """It continues outside of this process (`ClientOptions.leaves_tasks`)."""
    STOPPED = "stopped"
    """The client was told to stop; a task that had begun was given back."""
