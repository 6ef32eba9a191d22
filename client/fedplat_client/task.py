"""What a trainer and an evaluator see: the task, and the result that they return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt

from fedplat import claims
from fedplat.client_state import ClientState
from fedplat.model import Parameters, Schema
from fedplat.wire.v1 import model_pb2
from fedplat_client._state.privacy_ledger import PrivacyLedger
from fedplat_client.cancellation import Stop, StopSignal
from fedplat_client.options import ClientOptions

Scalar: TypeAlias = bool | int | float | str
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


@dataclass
class Control:
    """What the threads that work on one assignment share: its deadlines, its progress and the signal to stop.

    Deadlines are moments of the client's monotonic clock. They count from its making at first; each heartbeat's answer
    sets them again (`adjust`), since a server that was restarted may have other ones.
    """

    training_timeout_s: float = math.inf
    upload_timeout_s: float = 0.0
    options: ClientOptions = field(default_factory=ClientOptions)
    signal: StopSignal = field(default_factory=StopSignal)
    fraction: float = 0.0
    """How much of the training is done."""
    trained: bool = False
    """Whether the training is over and the upload is on."""

    def __post_init__(self) -> None:
        self._training_deadline_at = self.options.clock() + self.training_timeout_s
        self._deadline_at = self._training_deadline_at + self.upload_timeout_s

    def adjust(self, remaining_s: float, *, uploading: bool) -> None:
        """Take over the server's deadline, whether it is earlier or later than the one before.

        `uploading`: the server receives the update already, and no further time for that follows.
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

    def expire(self) -> None:
        """Stops the task because its time is up."""
        reason = model_pb2.REASON_UPLOAD_TIMEOUT if self.trained else model_pb2.REASON_TRAIN_TIMEOUT
        self.signal.set(Stop(reason, "the deadline of the assignment has passed"))

    def wait(self, seconds: float) -> None:
        """Waits; raises `Cancelled` when the task is stopped before or meanwhile."""
        self.options.wait(self.signal, seconds)
        self.signal.check()


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One piece of work: train, or evaluate, these parameters on this client's data.

    >>> import numpy as np
    >>> task = Task(name="digits", parameters=Parameters.from_arrays({"weight": np.ones(3, np.float32)}))
    >>> task.parameters["weight"] *= 2
    >>> task.progress(0.5)
    """

    name: str
    """Name of the trainer, or of the evaluator."""
    parameters: Parameters
    """The model to begin with; a copy that the trainer may change in place."""
    config: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """The job's hyper-parameters."""
    job_id: str = ""
    job_name: str = ""
    round: int = 1
    attempt: int = 1
    client_state: ClientState = field(default_factory=ClientState, repr=False)
    """What the client remembers of the job: kept until its next training if the update of this one is merged."""
    ledger: PrivacyLedger = field(default_factory=PrivacyLedger, repr=False)
    """What was told of single examples, of all jobs; for trainers that protect them."""
    control: Control = field(default_factory=Control, repr=False, compare=False)
    """The SDK's side of the task; trainers have no business here."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the training must be over; 0 when the time is up."""
        return max(0.0, self.control.training_remaining_s)

    @property
    def cancelled(self) -> bool:
        """Whether the task shall stop; the next `progress` raises `Cancelled` then."""
        return self.control.signal.is_set() or self.control.training_remaining_s <= 0

    def progress(self, fraction: float) -> None:
        """Notes how much of the work is done, 0 to 1; cheap enough to call for every batch.

        Raises `Cancelled` when the server said stop, the client is being stopped, or the time is up. Let it pass:
        the client does the rest.
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"the progress is {fraction}; expected a fraction between 0 and 1")
        self.control.fraction = fraction
        if self.control.training_remaining_s <= 0:
            self.control.expire()
        self.control.signal.check()


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainResult:
    """What a trainer returns: the trained parameters, or the difference that training made (`delta`).

    Both are `Parameters` or a mapping of arrays with the names, shapes and dtypes of `task.parameters`. Averages
    weigh the client by `num_examples`. Raises `ValueError` for a number that is not usable.
    """

    parameters: Parameters | Arrays | None = None
    num_examples: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    delta: Parameters | Arrays | None = None

    def __post_init__(self) -> None:
        if (self.parameters is None) == (self.delta is None):
            both = "both" if self.parameters is not None else "none"
            raise ValueError(f"TrainResult takes either parameters or delta; {both} of them is given")
        object.__setattr__(self, "num_examples", _checked_count(self.num_examples))
        object.__setattr__(self, "metrics", _checked_metrics(self.metrics))

    def to_update(self, base: Parameters) -> Parameters:
        """The update that leads from `base` to the result. Raises `ModelError` when it does not fit `base`."""
        if self.delta is not None:
            return _fit_schema(self.delta, base.schema)
        assert self.parameters is not None
        return _fit_schema(self.parameters, base.schema).minus(base)


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """What an evaluator returns. Raises `ValueError` for a number that is not usable."""

    num_examples: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_examples", _checked_count(self.num_examples))
        object.__setattr__(self, "metrics", _checked_metrics(self.metrics))


TrainFunction: TypeAlias = Callable[[Task], TrainResult]
EvaluateFunction: TypeAlias = Callable[[Task], EvaluateResult]


def _fit_schema(given: Parameters | Arrays, schema: Schema) -> Parameters:
    if isinstance(given, Parameters) and given.schema == schema:
        return given
    parameters = Parameters.zeros(schema)  # by name: the order in which a caller has its tensors does not matter
    parameters.assign(given)
    return parameters


def _checked_count(count: float) -> float:
    value = _number("num_examples", count)
    if problem := claims.check_examples(value):
        raise ValueError(problem)
    return value


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    checked = {name: _number(f"metric {name!r}", value) for name, value in metrics.items()}
    if problem := claims.check_metrics(checked):
        raise ValueError(problem)
    return checked


def _number(what: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # also NumPy scalars and tensors of one element
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{what} is {value!r}; expected a number") from exc
