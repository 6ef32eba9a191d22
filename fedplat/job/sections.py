"""The tables of a job file, each a frozen record with its own rules."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat import aggregate, codecs, labels
from fedplat.configuration import shown
from fedplat.errors import LabelError
from fedplat.sampling import Policy, Uniform

Scalar = bool | int | float | str
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Positive = Annotated[float, Meta(gt=0.0, le=31_536_000.0)]
# Not any positive number: a back-off of a nanosecond would be a busy loop.
Duration = Annotated[float, Meta(ge=0.01, le=31_536_000.0)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Factor = Annotated[float, Meta(ge=0.0, le=1e30)]


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the model of round 1 comes from: a `.safetensors` file, or `module:function` run at submission.

    Paths and modules are relative to the job file. The function returns `Parameters`, a `state_dict` or a module.
    """

    initial: str

    def __post_init__(self) -> None:
        if not self.initial.endswith(".safetensors") and not re.fullmatch(r"[\w.]+:[\w.]+", self.initial):
            raise ValueError(
                f"initial = {shown(self.initial)}: expected a path that ends in .safetensors, or module:function"
            )


class Selection(Struct, frozen=True, forbid_unknown_fields=True):
    """Who takes part.

    `goal` reports close an attempt; `ceil(over_selection * goal)` clients are assigned, because some drop out;
    `ceil(min_fraction * goal)` reports are enough when the deadline strikes. `where` is an expression over
    labels. Sampling, by the policy `sampling`, begins as soon as `wait_for` eligible clients wait (0: as many as shall
    be assigned). Whoever was assigned in a round is not drawn in the `min_separation` rounds after it. With
    `close = "deadline"` an attempt waits for everybody's report or deadline, whether or not the goal is reached.
    """

    goal: Count
    over_selection: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.3
    min_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.8
    sampling: Policy = Uniform()
    where: str = ""
    wait_for: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    min_separation: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    close: Literal["goal", "deadline"] = "goal"

    def __post_init__(self) -> None:
        try:
            labels.compile_expression(self.where)
        except LabelError as exc:
            raise ValueError(f"where = {shown(self.where)}: {exc}") from exc

    @property
    def target(self) -> int:
        """Number of clients to assign. Rounded first: 1.1 * 10 is 11, not 12."""
        return math.ceil(round(self.over_selection * self.goal, 9))

    @property
    def minimum(self) -> int:
        """Number of reports that are enough at the deadline."""
        return max(1, math.ceil(round(self.min_fraction * self.goal, 9)))

    @property
    def remembers(self) -> bool:
        """Whether selection asks what clients did in earlier rounds."""
        return self.min_separation > 0 or self.sampling.remembers


class Adaptive(Struct, frozen=True, forbid_unknown_fields=True):
    """A training deadline learned from the past: a percentile of what assignments took, times a margin.

    It holds once `after` assignments have reported, and stays within [min_s, deadlines.training_s].
    """

    percentile: Annotated[float, Meta(gt=0.0, le=100.0)] = 90.0
    margin: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.5
    min_s: Duration = 1.0
    after: Count = 20


class Deadlines(Struct, frozen=True, forbid_unknown_fields=True):
    """How long each phase may take, in seconds on the server's monotonic clock."""

    selection_s: Duration = 60.0
    training_s: Duration = 600.0
    upload_s: Duration = 300.0
    heartbeat_s: Annotated[float, Meta(ge=0.05, le=600.0)] = 10.0
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        if self.adaptive is not None and self.adaptive.min_s > self.training_s:
            raise ValueError(
                f"adaptive.min_s = {self.adaptive.min_s}: expected at most training_s, which is {self.training_s}"
            )


class Retry(Struct, frozen=True, forbid_unknown_fields=True):
    """How an abandoned attempt is tried again: after `base_s * 2^(n-1)` seconds, at most `max_s`, with jitter.

    After `max_attempts` failed attempts at one round the job fails (0: never).
    """

    base_s: Duration = 1.0
    max_s: Duration = 300.0
    max_attempts: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class Updates(Struct, frozen=True, forbid_unknown_fields=True):
    """How updates are weighted before they are aggregated.

    `examples`: by the number of examples, at most `max_examples` each; `uniform`: all alike. `clip_norm` bounds
    each update's L2 norm (0: no bound); `adaptive_clip` does so with a bound that follows their norms.

    An update whose norm is above `max_norm` is refused (0: none is). One whose norm is more than `outlier_factor` times
    the median norm of its attempt is dropped, and an update weighs at most `max_weight_factor` times the median of its
    attempt (0: off). What is not set follows from the job: see `JobSpec.outlier_factor` and `max_weight_factor` there.
    """

    weighting: Literal["examples", "uniform"] = "examples"
    max_examples: Positive = 1_000_000.0
    clip_norm: Annotated[float, Meta(ge=0.0, le=1e30)] = 0.0
    adaptive_clip: aggregate.AdaptiveClip | None = None
    max_norm: Annotated[float, Meta(ge=0.0, le=1e30)] = 0.0
    outlier_factor: Factor | None = None
    max_weight_factor: Factor | None = None

    def __post_init__(self) -> None:
        if self.clip_norm and self.adaptive_clip is not None:
            raise ValueError(
                f"clip_norm = {self.clip_norm}: expected 0 beside adaptive_clip, which bounds the norms too"
            )
        for name in ("outlier_factor", "max_weight_factor"):
            factor: float | None = getattr(self, name)
            if factor is not None and 0.0 < factor < 1.0:
                raise ValueError(f"{name} = {factor:g}: expected at least 1, or 0 to turn it off")
        if self.max_weight_factor and self.weighting == "uniform":
            raise ValueError(
                f"max_weight_factor = {self.max_weight_factor:g}: all updates weigh the same; expected 0, or "
                'weighting = "examples"'
            )

    @property
    def clips(self) -> bool:
        """Whether each update is scaled down to a bound."""
        return self.clip_norm > 0.0 or self.adaptive_clip is not None

    def clip(self, rule: aggregate.Rule) -> aggregate.Rule:
        """A rule that sees updates within the bound only, if there is one."""
        if self.adaptive_clip is not None:
            return self.adaptive_clip.build()(rule)
        return aggregate.clip_by_norm(self.clip_norm)(rule) if self.clip_norm else rule


class Compression(Struct, frozen=True, forbid_unknown_fields=True):
    """How what travels is compressed.

    `uplink`: the codec of the updates that clients send (none: float32 as it is). `downlink`: the codec of the step
    from one version to the next, which clients that have the one download instead of the other (none: whole models).
    """

    uplink: codecs.Options | None = None
    downlink: codecs.Options | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the codecs that a client has to know. Without that of the downlink it gets whole models."""
        return frozenset() if self.uplink is None else frozenset({str(self.uplink.__struct_config__.tag)})


class ClientEvaluation(Struct, frozen=True, forbid_unknown_fields=True):
    """Federated evaluation: `goal` clients score the committed model on their data and report metrics only."""

    evaluator: Name
    goal: Count
    min_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    timeout_s: Duration = 60.0


class Evaluation(Struct, frozen=True, forbid_unknown_fields=True):
    """Who scores the committed models of every `every`-th round, and of the last one.

    `server` names an evaluator that the operator gave to the server (`fedplat-server run --evaluator`).
    """

    every: Count = 1
    server: Name | None = None
    clients: ClientEvaluation | None = None

    def is_due(self, round_number: int, num_rounds: int) -> bool:
        """Return whether the version that a round has made is scored, in a job of `num_rounds` rounds."""
        return round_number % self.every == 0 or round_number >= num_rounds


class Retention(Struct, frozen=True, forbid_unknown_fields=True):
    """What the server keeps of a job's past; it removes the rest, behind the rounds.

    Model files: those of the newest `versions` (0: of all), and of each version whose number is a multiple of `every`
    (0: no others). Version 0, the latest, and what clients work with are always kept. The rule's states of the newest
    `states` versions; a private job keeps that of the latest only, and none when it has ended. The history of attempts
    that ended more than `history_days` days ago is removed (0: never).
    """

    versions: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    every: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    states: Count = 2
    history_days: Annotated[float, Meta(ge=0.0, le=36_500.0)] = 0.0

    def __post_init__(self) -> None:
        if self.every and not self.versions:
            raise ValueError(f"every = {self.every}: expected versions beside it; without it all versions are kept")
