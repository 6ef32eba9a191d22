"""The tables of a job file, each a frozen record with its own checks.

The string below each field is its entry in docs/job-reference.md (`reference.py`).
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat import aggregate, codecs, errors, sampling, texts
from fedplat.config import label_expressions, plugins
from fedplat.config.toml import format_value
from fedplat.sampling import Policy, Uniform

Scalar = bool | int | float | str
Name = Annotated[str, Meta(pattern=f"^{texts.NAME_PATTERN}$")]
Positive = Annotated[float, Meta(gt=0.0, le=31_536_000.0)]
# The minimum is not 0: a back-off of a nanosecond would be a busy loop.
Duration = Annotated[float, Meta(ge=0.01, le=31_536_000.0)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Factor = Annotated[float, Meta(ge=0.0, le=1e30)]


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """Source of the initial model."""

    initial: str
    """Path of a `.safetensors` file, or `module:function`, both relative to the job file. The function runs where the
    job is submitted and returns `Parameters`, named NumPy arrays, a `state_dict` or a PyTorch module."""

    def __post_init__(self) -> None:
        if not self.initial.endswith(".safetensors") and not re.fullmatch(r"[\w.]+:[\w.]+", self.initial):
            raise ValueError(
                f"initial = {format_value(self.initial)}: expected a path that ends in .safetensors, or module:function"
            )


def _count_fraction(fraction: float, total: int) -> int:
    """Return `ceil(fraction × total)`, at least 1. The product is rounded first: 0.7 * 10 is 7, not 8."""
    return max(1, math.ceil(round(fraction * total, 9)))


class Selection(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Clients that take part, and when an attempt closes."""

    goal: Count
    """Number of reports that close an attempt."""
    over_selection: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.3
    """`ceil(over_selection × goal)` clients are assigned, because some drop out."""
    min_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.8
    """`ceil(min_fraction × goal)` reports are enough when no assigned client is left to wait for."""
    sampling: Policy = Uniform()
    """Policy that draws the clients, such as `sampling = { policy = "stratified", label = "region" }`."""
    where: str = ""
    """Expression over labels that eligible clients satisfy, such as `region == 'eu' and memory_mb >= 4096`, with
    `and or not in` and `== != < <= > >=`."""
    wait_for: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Number of eligible clients that must wait before the sample is drawn; 0: the number to assign."""
    min_separation: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """A client that was assigned in a round is not drawn in this many rounds after it, also across restarts of the
    server."""
    close: Literal["goal", "deadline"] = "goal"
    """When an attempt closes: at `goal` reports, or with `"deadline"` once no client is at work any more."""

    def __post_init__(self) -> None:
        try:
            label_expressions.compile_expression(self.where)
        except errors.LabelError as exc:
            raise ValueError(f"where = {format_value(self.where)}: {exc}") from exc

    @property
    def target(self) -> int:
        """The number of clients to assign. The product is rounded first: 1.1 * 10 is 11, not 12."""
        return math.ceil(round(self.over_selection * self.goal, 9))

    @property
    def minimum(self) -> int:
        """The number of reports that are enough at the deadline."""
        return self.minimum_of(self.goal)

    def minimum_of(self, goal: int) -> int:
        """Return the number of reports that are enough at the deadline of an attempt with this goal."""
        return _count_fraction(self.min_fraction, goal)

    @cached_property
    def uses_history(self) -> bool:
        """True if the policy uses the clients' history: read once, since the policy of a plugin may fail later.

        Raises `UserCodeError` then.
        """
        return sampling.uses_history(self.sampling)

    @property
    def remembers(self) -> bool:
        """True if selection depends on participation in earlier rounds."""
        return self.min_separation > 0 or self.uses_history


class Adaptive(Struct, frozen=True, forbid_unknown_fields=True):
    """Training deadline that follows the durations of past assignments; without this table it is `training_s`."""

    percentile: Annotated[float, Meta(gt=0.0, le=100.0)] = 90.0
    """Percentile of the durations of past assignments."""
    margin: Annotated[float, Meta(ge=1.0, le=100.0)] = 1.5
    """Factor by which that percentile is multiplied."""
    min_s: Duration = 1.0
    """Lowest deadline, in seconds; the highest is `deadlines.training_s`."""
    after: Count = 20
    """Number of reported assignments from which on the deadline is adaptive."""


class Deadlines(Struct, frozen=True, forbid_unknown_fields=True):
    """Duration of each phase, in seconds on the server's monotonic clock."""

    selection_s: Duration = 60.0
    """After this, clients are drawn from those that wait, if these are at least the minimum."""
    training_s: Duration = 600.0
    """Time for download and training."""
    upload_s: Duration = 300.0
    """Time for the upload, from its start."""
    heartbeat_s: Annotated[float, Meta(ge=0.05, le=600.0)] = 10.0
    """Interval at which a client reports its progress, and receives the remaining time."""
    adaptive: Adaptive | None = None
    """Training deadline that follows past durations; none: always `training_s`."""

    def __post_init__(self) -> None:
        if self.adaptive is not None and self.adaptive.min_s > self.training_s:
            raise ValueError(
                f"adaptive.min_s = {self.adaptive.min_s}: expected at most training_s, which is {self.training_s}"
            )


class Retry(Struct, frozen=True, forbid_unknown_fields=True):
    """Back-off between attempts at the same round."""

    base_s: Duration = 1.0
    """The n-th failed attempt is retried after `base_s × 2^(n-1)` seconds, times a random factor from 0.5 to 1."""
    max_s: Duration = 300.0
    """Longest back-off, in seconds."""
    max_attempts: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """The job fails after this many failed attempts at one round; 0: never."""
    pause_after: Annotated[int, Meta(ge=0, le=1_000_000)] = 10
    """Without `max_attempts`, the job is paused after this many attempts in a row that failed because clients' training
    failed or was refused, their updates were rejected, or the updates could not be aggregated, since another try would
    fail alike; 0: never. Attempts that fail because clients are away do not count, and failures of fewer than 20
    clients do not pause a job whose other clients could do its work."""


class Updates(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights and bounds of updates before they are aggregated."""

    weighting: Literal["examples", "uniform"] = "examples"
    """Weight of an update: its number of examples, or 1 for each."""
    max_examples: Positive = 1_000_000.0
    """Largest number of examples that one update counts for."""
    clip_norm: Annotated[float, Meta(ge=0.0, le=1e30)] = 0.0
    """Bound on the L2 norm of an update, which is scaled down to it; 0: no bound."""
    adaptive_clip: aggregate.AdaptiveClip | None = None
    """Bound that follows the norms of the updates; none: no such bound."""
    max_norm: Annotated[float, Meta(ge=0.0, le=1e30)] = 0.0
    """An update with a larger L2 norm is refused (`REJECTED_NORM`); 0: no update is."""
    outlier_factor: Factor | None = None
    """An update whose L2 norm is more than this many times the median of its attempt is dropped (`REJECTED_OUTLIER`);
    0: off. When it is not set: 1000, or 0 with `clip_norm`, `adaptive_clip` or `[robust]`."""
    max_weight_factor: Factor | None = None
    """With `weighting = "examples"`, an update counts for at most this many times the median number of examples of its
    attempt; 0: off. When it is not set: 10, or 0 with `[privacy]`."""

    def __post_init__(self) -> None:
        if self.clip_norm and self.adaptive_clip is not None:
            raise ValueError(f"clip_norm = {self.clip_norm}: expected 0 with adaptive_clip, which bounds the norms too")
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
        """True if each update is scaled down to a bound."""
        return self.clip_norm > 0.0 or self.adaptive_clip is not None

    def clip(self, rule: aggregate.Rule) -> aggregate.Rule:
        """Wrap a rule so that it gets only updates within the bound, if there is one."""
        if self.adaptive_clip is not None:
            return self.adaptive_clip.build()(rule)
        return aggregate.clip_by_norm(self.clip_norm)(rule) if self.clip_norm else rule


class Compression(Struct, frozen=True, forbid_unknown_fields=True):
    """Codecs of transferred updates and versions."""

    uplink: codecs.CodecOptions | None = None
    """Codec of the updates that clients send, such as `uplink = { codec = "bf16" }`; none: float32. Clients that do not
    support the codec are not eligible."""
    downlink: codecs.CodecOptions | None = None
    """Codec of the step from one version to the next, which clients with the previous version download; none: whole
    models. Clients without that version, or that do not support the codec, download the whole model."""

    @property
    def names(self) -> frozenset[str]:
        """The codecs that a client must support. One without that of the downlink gets whole models."""
        return frozenset() if self.uplink is None else frozenset({plugins.name_of(self.uplink)})


class ClientEvaluation(Struct, frozen=True, forbid_unknown_fields=True):
    """Federated evaluation: clients score the committed model on their data and report metrics only.

    As in every attempt, a mean is stored for each metric that more than half of the reports have.
    """

    evaluator: Name
    """Name under which the evaluation function is installed on the clients."""
    goal: Count
    """Number of reports that close an evaluation."""
    min_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """`ceil(min_fraction × goal)` reports are enough at the deadline."""
    timeout_s: Duration = 60.0
    """Deadline of a client's evaluation, in seconds."""

    @property
    def minimum(self) -> int:
        """The number of reports that are enough at the deadline."""
        return _count_fraction(self.min_fraction, self.goal)


class Evaluation(Struct, frozen=True, forbid_unknown_fields=True):
    """Evaluation of committed models."""

    every: Count = 1
    """Every n-th round is evaluated, and the last one."""
    server: Name | None = None
    """Evaluator of the server (`fedplat-server run --evaluator NAME=module:function`), or a trainer of it (`--trainer`)
    that has examples to evaluate on; none: the server evaluates nothing."""
    clients: ClientEvaluation | None = None
    """Federated evaluation; none: clients evaluate nothing."""

    def is_due(self, round_number: int, num_rounds: int) -> bool:
        """Return whether the version of a round is evaluated, in a job of `num_rounds` rounds."""
        return round_number % self.every == 0 or round_number >= num_rounds


class Flower(Struct, frozen=True, forbid_unknown_fields=True):
    """A Flower app whose ServerApp the server runs: it draws the clients, and decides when the job is complete.

    Each set of messages that it sends to clients is a round. A client needs the app as its trainer.
    """

    app: Name
    """Name of the app on the server (`fedplat-server run --flower-app NAME=FOLDER`)."""
    run_config: dict[str, Scalar] = {}
    """Values in place of those of the app's `[tool.flwr.app.config]`."""
    max_reply_mb: Annotated[float, Meta(ge=0.0, le=1_000_000.0)] = 0.0
    """Maximum size of a client's reply, in MiB; 0: 64 MiB and twice the size of the message."""
    array_types: Annotated[tuple[Annotated[str, Meta(max_length=100)], ...], Meta(max_length=16)] = ()
    """Serializations of arrays (`Array.stype`) that replies may have besides `"numpy.ndarray"`, such as `[""]` for the
    trees of an app of Flower's old API. The server cannot check what is in them."""
    max_weight_factor: Annotated[float, Meta(ge=0.0, le=1_000_000.0)] = 10.0
    """In the rounds of a strategy, the weight of a reply (`num-examples`) counts for at most this many times the median
    of its round, if there are three replies or more; 0: any number."""

    def max_reply_bytes(self, message_bytes: int) -> int:
        """Return the maximum size of a reply to a message of this size."""
        return int(self.max_reply_mb * 2**20) or 64 * 2**20 + 2 * message_bytes


class Approval(Struct, frozen=True, forbid_unknown_fields=True):
    """What the owners of the clients are asked before the job begins, and by whom (docs/approval.md)."""

    required: bool = True
    """True: only clients whose owners have approved the job take part, and round 1 waits for `quorum`. False: the table
    only tells owners purpose and contact."""
    quorum: Literal["all"] | int | float = "all"
    """How many clients must have approved before round 1: `"all"` that are enrolled in the population, a part of them
    below 1, or a number."""
    purpose: Annotated[str, Meta(max_length=1000)] = ""
    """Purpose of the job, for the owners, such as a study and its approval by a board."""
    contact: Annotated[str, Meta(max_length=200)] = ""
    """Person or address that the owners may ask."""

    def __post_init__(self) -> None:
        if isinstance(self.quorum, float) and not 0.0 < self.quorum < 1.0:
            raise ValueError(f'quorum = {self.quorum:g}: expected "all", a whole number, or a part above 0 and below 1')
        if isinstance(self.quorum, int) and not 1 <= self.quorum <= 1_000_000_000:
            raise ValueError(f'quorum = {self.quorum}: expected "all", or a number of at least 1')

    def needed_of(self, num_clients: int) -> int:
        """Return how many of so many enrolled clients must have approved, at least 1."""
        if isinstance(self.quorum, str):
            return max(1, num_clients)
        if isinstance(self.quorum, int):
            return self.quorum
        return max(1, _count_fraction(self.quorum, num_clients))


class Retention(Struct, frozen=True, forbid_unknown_fields=True):
    """Files and history of the job that the server keeps; it removes the rest in the background.

    Version 0, the latest version and those that clients work with are always kept. `fedplat job set` changes these
    options of a job that has not ended.
    """

    versions: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Number of newest versions with model files; 0: all versions keep theirs, but those of a running job only the
    newest 5 while the disk is nearly full."""
    every: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Versions that are a multiple of this keep their model files as well; needs `versions`."""
    states: Count = 2
    """Number of newest versions with states of the aggregation rule. A private job keeps only the latest, and none once
    it has ended."""
    history_days: Annotated[float, Meta(ge=0.0, le=36_500.0)] = 0.0
    """History of attempts that ended more days ago than this is removed; 0: never."""

    def __post_init__(self) -> None:
        if self.every and not self.versions:
            raise ValueError(f"every = {self.every}: expected versions with it; without it all versions are kept")
