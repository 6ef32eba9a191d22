"""What distinguishes one kind of job or attempt from another: a record of pure functions.

Each function gets the whole state of the job and returns a new one; none has a state, a clock or randomness of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedplat.job import JobSpec
from fedplat.rounds import attempts, closing, restart
from fedplat.rounds.commands import Command
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, CandidatesDrawn, JobEvent, UpdateReported
from fedplat.rounds.protocols import averaging
from fedplat.rounds.protocols.base import AttemptSizes, Ending, Handler, Roll
from fedplat.rounds.records import Assignment, Attempt, JobState, SecureMessages
from fedplat.rounds.selection import Demand
from fedplat.rounds.states import AttemptPhase
from fedplat.rounds.transition import ACCEPTED, Context, Transition, Verdict


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

    The defaults are those of synchronous averaging. The constructor is checked by types, `dataclasses.replace` is not.

    `folds`: reports have updates, which are added to a sum, and its commit makes a version. `retries`: an attempt that
    fails is tried again. `finishes`: a pause lets a version that is being made become durable. `keeps_updates`: the
    server has the updates. `features` are the parts of the wire protocol that a client must implement.
    """

    name: str
    folds: bool = True
    retries: bool = True
    finishes: bool = True
    keeps_updates: bool = True
    features: frozenset[str] = frozenset()
    first_phase: AttemptPhase = AttemptPhase.COLLECTING
    column: str = "protocol"
    """The column of `jobs` that keeps its state (`JobState.protocol`) between attempts."""
    write_state: Callable[[JobState], object] = lambda job: None
    """Return its state in a form for JSON."""
    read_state: Callable[[object, JobSpec], object] = averaging.read_no_state
    """Read its state from that form. Raises `msgspec.ValidationError` if it has none, or is of a newer release."""
    handlers: Mapping[type[Any], Handler] = dataclasses.field(default_factory=dict[type[Any], Handler])
    membership: Membership = Membership()

    # --- its attempts: sync, attempts ---
    begin: Callable[[JobState, Context], Transition | None] = averaging.begin
    """Open the next attempt of this kind or end the job; None if it is not time for one."""
    sizes: Callable[[JobState], AttemptSizes] = averaging.size_cohort
    advance: Callable[[JobState, Attempt, Context], Transition | None] = lambda job, attempt, context: None
    """Go on without an event; None if there is nothing to do."""
    describe: Callable[[JobState, Attempt], str] = lambda job, attempt: f"round {attempt.key.round}"

    # --- its clients: selection, attempts, coordinator ---
    demand: Callable[[JobState, Attempt], Demand | None] = averaging.demand_cohort
    num_needed: Callable[[JobState], int] = lambda job: max(job.spec.num_wanted, job.spec.selection.wait_for)
    """How many clients must wait at the same time."""
    selects: Callable[[JobState, Attempt], bool] = lambda job, attempt: attempt.awaits_clients
    """Whether the end of the time for selection completes a draw."""
    count_candidates: Callable[[JobState, Attempt, CandidatesDrawn], tuple[int, int]] = averaging.count_candidates
    """How many clients were found, and how many are needed."""
    on_drawn: Callable[[JobState, Attempt, CandidatesDrawn, Context], Transition] = attempts.assign_cohort
    make_part: Callable[[], SecureMessages | None] = lambda: None
    timeouts: Callable[[JobState], tuple[float, float]] = attempts.timeouts
    longest_s: Callable[[JobState, Assignment], float] = averaging.longest_s
    closes_at: Callable[[JobState, float], float | None] = lambda job, now: None
    """The only moment at which an attempt that begins to collect now may close; None if it may close earlier."""
    on_reclaimed: Callable[[JobState, Assignment, Context], Transition] = attempts.reassign

    # --- its reports: attempts ---
    judge_upload: Callable[[JobState, Assignment], Verdict] = lambda job, assignment: ACCEPTED
    on_reported: Callable[[JobState, Assignment, UpdateReported, Context], Transition] = attempts.take_report
    judge_report: Callable[[JobState, Attempt, Assignment, UpdateReported], tuple[JobState, Verdict]] = (
        attempts.judge_claim
    )
    weigh: Callable[[JobState, Assignment, int], float] = averaging.weigh
    on_ended: Callable[[JobState, Assignment, Context], Transition] = attempts.go_on
    """Go on after a busy assignment has failed, or was rejected or revoked."""

    # --- its ends: closing, restart, rollback ---
    judge_end: Callable[[JobState, Attempt, Context], Ending] = averaging.judge_end
    on_deadline: Callable[[JobState, Context], Transition] = closing.drop_late
    release_busy: Callable[[JobState, Attempt], tuple[JobState, Attempt, tuple[Command, ...]]] = closing.release_surplus
    """What becomes of busy clients when the attempt commits."""
    on_committed: Callable[[JobState, AttemptAggregated], Transition] = lambda job, event: Transition(job)
    on_aggregation_failed: Callable[[JobState, Attempt, AggregationFailed], tuple[JobState, str]] = (
        averaging.describe_failure
    )
    resume: Callable[[JobState, Attempt, Context], Transition] = restart.resume
    deadlines: Callable[[JobState, Attempt], Iterable[float | None]] = averaging.list_deadlines
    refuse_rollback: Callable[[JobState], str] = lambda job: ""
