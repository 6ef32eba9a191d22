"""What distinguishes one kind of job or attempt from another, a record of functions, and the only switch between them.

Each function gets the whole state of the job and returns a new one; none has a state, a clock or randomness of its own.

Code that is common to all kinds (`attempts`, `closing`, `selection`, `coordinator`) asks `protocol_of`, always with the
job in hand and never with a record that it has kept. So a wrapper (`private`) also applies where the functions of the
inner record call common code, which asks again.

A job has one protocol for its training (`training_of`), and attempts of other kinds have theirs: the same job is
averaged in one attempt and evaluated in the next. An assignment that outlives its attempt keeps the kind of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.rounds.commands import ACCEPTED, Command, Context, Transition, Verdict
from fedplat.rounds.demand import Demand
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, CandidatesDrawn, JobEvent, UpdateReported
from fedplat.rounds.records import Assignment, Attempt, JobState, SecureMessages
from fedplat.rounds.states import AttemptKind, AttemptPhase

Handler = Callable[[JobState, Any, Context], Transition]


class AttemptSizes(NamedTuple):
    """The numbers of an attempt: `goal` reports close it, `minimum` are enough, `target` clients work for it."""

    goal: int
    minimum: int
    target: int


class Ending(Enum):
    """What an open attempt does after one of its assignments has ended, or its deadline has passed.

    `WAIT_FOR_CLIENTS`: no client works for it, and it waits for others as long as a selection.
    """

    WAIT = auto()
    WAIT_FOR_CLIENTS = auto()
    CLOSE = auto()
    FAIL = auto()


class PhaseProgress(NamedTuple):
    """How many clients have done their part of a phase, and how many are to."""

    phase: AttemptPhase
    num_done: int
    num_wanted: int


class Roll(NamedTuple):
    """The members whose presence is asked for now; `is_last`: those that are absent have no more time."""

    members: Collection[str]
    is_last: bool


OF_AVERAGING: Any = None
"""The default of a function that is the one of synchronous averaging (`averaging.AVERAGING`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """The part of a kind whose clients belong to the job between their assignments: silos, or a clock set.

    `awaits`: whether the job waits for a client, which must not stay away. `revoked` returns the event with which a
    client leaves. `roll` returns whom to call now. `follow` updates the state after each transition.
    """

    awaits: Callable[[JobState, str], bool] = lambda job, client_id: False
    revoked: Callable[[JobState, str], JobEvent | None] = lambda job, client_id: None
    roll: Callable[[JobState, Context], Roll | None] = lambda job, context: None
    follow: Callable[[JobState, JobState, Context], JobState] = lambda before, after, context: after
    expect: Callable[[JobState, Context], JobState] = lambda job, context: job
    next_moment: Callable[[JobState], float | None] = lambda job: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundProtocol:
    """One kind of attempts to train, or attempts of another kind. Comments name the callers.

    The constructor is checked by types, `dataclasses.replace` is not.

    `folds`: reports have updates, which are added to a sum, and its commit makes a version. `retries`: an attempt that
    fails is tried again. `finishes`: a pause lets a version that is being made become durable. `keeps_updates`: the
    server has the updates. `features` are the parts of the wire protocol that a client must implement.
    """

    name: str
    folds: bool = True
    retries: bool = True
    finishes: bool = True
    keeps_updates: bool = True
    makes_versions: bool = True
    """Each committed round makes one."""
    may_be_empty: bool = False
    """An attempt may commit without a report."""
    carries_over: bool = False
    """Clients may continue to work after the end of their attempt."""
    has_masks: bool = False
    """Clients mask their updates, and the weights are inside."""
    draws: bool = True
    """Its clients are drawn from those that wait."""
    has_rule: bool = True
    """The job's aggregation rule makes its versions, and the state beside them is that of the rule."""
    client_option: str = ""
    """The option without which a client refuses to take part."""
    features: frozenset[str] = frozenset()
    first_phase: AttemptPhase = AttemptPhase.COLLECTING
    column: str = "protocol"
    """The column of `jobs` that keeps its state (`JobState.protocol`) between attempts."""
    write_state: Callable[[JobState], object] = lambda job: None
    """Return its state in a form for JSON."""
    read_state: Callable[[object, JobSpec], object] = OF_AVERAGING
    """Read its state from that form. Raises `msgspec.ValidationError` if it has none, or is of a newer release."""
    handlers: Mapping[type[Any], Handler] = dataclasses.field(default_factory=dict[type[Any], Handler])
    membership: Membership = Membership()

    # --- its job file: what can be known before a job begins ---
    first_model: Callable[[JobSpec], Parameters | None] = lambda spec: None
    """Return the initial model of a job whose file names none; None: it is that of `[model]`."""
    list_needs: Callable[[JobSpec], list[tuple[str, int]]] = OF_AVERAGING
    """Return the numbers of clients that there must be, with the keys that demand them; empty without a bound."""
    describe_cohort: Callable[[JobSpec], str] = OF_AVERAGING
    """Return how many clients take part in a round: the end of `5 rounds for population p, ...`."""
    list_disclosures: Callable[[JobSpec], list[str]] = lambda spec: []
    """Return what leaves a client, a line for each kind of number, if the job file declares it."""
    refuse_server: Callable[[JobSpec], str] = lambda spec: ""
    """Return why no server can run a job, although a simulation may; empty if one can."""

    # --- its attempts: sync, attempts ---
    begin: Callable[[JobState, Context], Transition | None] = OF_AVERAGING
    """Open the next attempt of this kind or end the job; None if it is not time for one."""
    sizes: Callable[[JobState], AttemptSizes] = OF_AVERAGING
    advance: Callable[[JobState, Attempt, Context], Transition | None] = lambda job, attempt, context: None
    """Go on without an event; None if there is nothing to do."""
    count_phase: Callable[[JobState, Attempt], PhaseProgress | None] = lambda job, attempt: None
    """Return how many clients have done their part of an open attempt's phase; None if they train and report only."""
    describe: Callable[[JobState, Attempt], str] = lambda job, attempt: f"round {attempt.key.round}"
    describe_start: Callable[[int], str] = lambda num_waiting: ""
    """Return what a job does before its first round, if this may wait for clients; `num_waiting` of them wait."""

    # --- its clients: selection, attempts, coordinator ---
    demand: Callable[[JobState, Attempt], Demand | None] = OF_AVERAGING
    num_needed: Callable[[JobState], int] = lambda job: max(job.spec.num_wanted, job.spec.selection.wait_for)
    """How many clients must wait at the same time."""
    selects: Callable[[JobState, Attempt], bool] = lambda job, attempt: attempt.awaits_clients
    """Whether the end of the time for selection completes a draw."""
    count_candidates: Callable[[JobState, Attempt, CandidatesDrawn], tuple[int, int]] = OF_AVERAGING
    """How many clients were found, and how many are needed."""
    on_drawn: Callable[[JobState, Attempt, CandidatesDrawn, Context], Transition] = OF_AVERAGING
    make_part: Callable[[], SecureMessages | None] = lambda: None
    list_messages: Callable[[Assignment], Mapping[str, bytes]] = lambda assignment: {}
    """Return the messages that a client has sent in its part, by their kinds: `changes`."""
    forget_messages: Callable[[Attempt], Attempt] = lambda attempt: attempt
    """Remove them from an attempt that ends: `closing`."""
    timeouts: Callable[[JobState], tuple[float, float]] = OF_AVERAGING
    longest_s: Callable[[JobState, Assignment], float] = OF_AVERAGING
    closes_at: Callable[[JobState, float], float | None] = lambda job, now: None
    """The only moment at which an attempt that begins to collect now may close; None if it may close earlier."""
    on_reclaimed: Callable[[JobState, Assignment, Context], Transition] = OF_AVERAGING

    # --- its reports: attempts ---
    judge_upload: Callable[[JobState, Assignment], Verdict] = lambda job, assignment: ACCEPTED
    on_reported: Callable[[JobState, Assignment, UpdateReported, Context], Transition] = OF_AVERAGING
    judge_report: Callable[[JobState, Attempt, Assignment, UpdateReported], tuple[JobState, Verdict]] = OF_AVERAGING
    weigh: Callable[[JobState, Assignment, int], float] = OF_AVERAGING
    on_ended: Callable[[JobState, Assignment, Context], Transition] = OF_AVERAGING
    """Go on after a busy assignment has failed, or was rejected or revoked."""

    # --- its ends: closing, restart, operators ---
    judge_end: Callable[[JobState, Attempt, Context], Ending] = OF_AVERAGING
    on_deadline: Callable[[JobState, Context], Transition] = OF_AVERAGING
    release_busy: Callable[[JobState, Attempt], tuple[JobState, Attempt, tuple[Command, ...]]] = OF_AVERAGING
    """What becomes of busy clients when the attempt commits."""
    on_committed: Callable[[JobState, AttemptAggregated], Transition] = lambda job, event: Transition(job)
    on_aggregation_failed: Callable[[JobState, Attempt, AggregationFailed], tuple[JobState, str]] = OF_AVERAGING
    resume: Callable[[JobState, Attempt, Context], Transition] = OF_AVERAGING
    deadlines: Callable[[JobState, Attempt], Iterable[float | None]] = OF_AVERAGING
    refuse_rollback: Callable[[JobState], str] = lambda job: ""


_PROTOCOLS: dict[str, RoundProtocol] = {}


def register(protocol: RoundProtocol) -> RoundProtocol:
    """Add a protocol to the table, with the functions of averaging where it has none (`registry` imports all)."""
    assert protocol.name not in _PROTOCOLS
    missing = [field.name for field in dataclasses.fields(protocol) if getattr(protocol, field.name) is OF_AVERAGING]
    if missing:
        protocol = dataclasses.replace(protocol, **{name: getattr(_PROTOCOLS["sync"], name) for name in missing})
    _PROTOCOLS[protocol.name] = protocol
    return protocol


def training_name(spec: JobSpec) -> str:
    """Return the name of the protocol of a job's training: the only place that asks for the tables of a job file."""
    if spec.flower is not None:
        return "flower_app"
    if spec.procedure is not None:
        return "procedure" if spec.secure_aggregation is None else "secure_procedure"
    name = "secure" if spec.secure_aggregation is not None else str(spec.mode.__struct_config__.tag)
    return f"private {name}" if spec.privacy is not None else name


def training_of(job: JobState) -> RoundProtocol:
    """Return the protocol of a job's training."""
    return find_training(job.spec)


def find_training(spec: JobSpec) -> RoundProtocol:
    """Return the protocol of the training of a job with this file."""
    return _PROTOCOLS[training_name(spec)]


_OTHERS: Mapping[AttemptKind, str] = {AttemptKind.EVALUATE: "evaluation", AttemptKind.WARM_START: "warm_start"}


def protocol_of(job: JobState, kind: AttemptKind) -> RoundProtocol:
    """Return the protocol of a job's attempts, or assignments, of a kind."""
    return training_of(job) if kind is AttemptKind.TRAIN else _PROTOCOLS[_OTHERS[kind]]


def find_protocol(spec: JobSpec | None, kind: str) -> RoundProtocol:
    """Return the protocol of stored attempts of a kind, of a job whose file cannot be read if `spec` is None.

    An unknown kind is not one to train.
    """
    if kind == AttemptKind.TRAIN:
        return find_training(spec) if spec is not None else _PROTOCOLS["sync"]
    return _PROTOCOLS["warm_start" if kind == AttemptKind.WARM_START else "evaluation"]


def list_protocols(job: JobState) -> tuple[RoundProtocol, ...]:
    """Return the protocols that may begin the next attempt, in their order."""
    return _PROTOCOLS["warm_start"], _PROTOCOLS["evaluation"], training_of(job)


def list_registered() -> Mapping[str, RoundProtocol]:
    """Return all protocols by name."""
    return _PROTOCOLS
