"""The funnel of an attempt: how many clients came to each step of a round, and where most of them were lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

FIRST_OF_COHORT = 2
"""The position of "selected": before it, clients are chosen; after it, they are lost."""
ENDED = frozenset({admin_pb2.ATTEMPT_PHASE_COMMITTED, admin_pb2.ATTEMPT_PHASE_ABANDONED})
"""Phases of an attempt that has ended."""
_STEPS = {
    admin_pb2.ATTEMPT_PHASE_ADVERTISING: "have trained and sent their keys",
    admin_pb2.ATTEMPT_PHASE_SHARING: "have sent the shares of their secrets",
    admin_pb2.ATTEMPT_PHASE_COLLECTING: "have sent their masked update",
    admin_pb2.ATTEMPT_PHASE_CONFIRMING: "have confirmed whose updates are in the sum",
    admin_pb2.ATTEMPT_PHASE_UNMASKING: "have sent the shares that remove the masks",
    admin_pb2.ATTEMPT_PHASE_EXCHANGING: "have the models of their neighbours",
    admin_pb2.ATTEMPT_PHASE_REDUCING: "have the mean of the ring",
}


@dataclasses.dataclass(frozen=True)
class FunnelStep:
    """A step of a round. `count` is None if the server does not know it, or if the attempt is not there yet.

    `meaning` describes the clients that came to it; `loss` names what did not happen to those that are missing from
    here on.
    """

    name: str
    count: int | None
    meaning: str
    loss: str = ""


def steps(attempt: admin_pb2.Round) -> Sequence[FunnelStep]:
    """Return the steps of an attempt, from the clients that checked in to the merged updates."""
    is_committed = attempt.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED
    named = (
        FunnelStep("checked in", attempt.checked_in, "clients of the population that were waiting"),
        FunnelStep("eligible", attempt.eligible, "of these, clients that may be selected", "could not be selected"),
        FunnelStep("selected", attempt.assigned, "clients that got an assignment"),
        FunnelStep("downloaded", attempt.downloaded, "clients that received the model", "did not receive the model"),
        FunnelStep(
            "trained",
            attempt.trained,
            "clients that completed the training",
            "received the model but did not complete the training",
        ),
        FunnelStep(
            "reported",
            attempt.reported,
            "clients whose update was accepted",
            "completed the training, but their update was not accepted",
        ),
        FunnelStep(
            "merged",
            attempt.merged if is_committed else None,
            "updates in the committed version",
            "reported, but the version was made without them",
        ),
    )
    if attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE:
        named = named[:-1]
    # A later step is never empty without reason: 0 before a number means that the server did not count.
    last = max((at for at, step in enumerate(named) if step.count), default=-1)
    return [
        dataclasses.replace(step, count=None) if not step.count and at < last else step for at, step in enumerate(named)
    ]


def largest_loss(attempt: admin_pb2.Round) -> str:
    """Return a sentence that names the step at which an attempt lost the most clients; empty if it lost none."""
    if attempt.phase not in ENDED:
        return _open(attempt)
    if attempt.assigned < attempt.target and (attempt.eligible or not attempt.assigned):
        rest = f" of the {attempt.checked_in:,} that had checked in" if attempt.checked_in else ""
        return f"{attempt.target:,} clients were wanted, but only {attempt.eligible:,}{rest} were eligible"
    worst, before, skips = ("", 0, 0), 0, False
    for step in steps(attempt)[FIRST_OF_COHORT:]:
        if step.count is None:
            skips = True  # it is not known at which of the steps the clients were lost
            continue
        if step.loss and before - step.count > worst[1]:
            worst = (f"did not come to the step {step.name!r}" if skips else step.loss, before - step.count, before)
        before, skips = step.count, False
    loss, count, base = worst
    if 0 < count <= attempt.surplus:
        return f"no loss: {format_count(attempt.surplus, 'client')} more than needed, since the goal was reached"
    return f"the largest loss: {count:,} of {format_count(base, 'client')} {loss}" if count else ""


def describe_step(progress: admin_pb2.AttemptProgress) -> str:
    """Return how far a step of secure aggregation or of an exchange is: `8 of 10 clients ...`; empty without one."""
    step = progress.step
    if step.phase not in _STEPS:
        return ""
    return f"{step.num_done:,} of {format_count(step.num_wanted, 'client')} {_STEPS[step.phase]}"


def list_facts(attempt: admin_pb2.Round) -> dict[str, str]:
    """Return the other numbers that an attempt has as texts, by their names."""
    facts: dict[str, str] = {}
    if attempt.num_survivors:
        facts["unmasked"] = f"sums of at least {format_count(attempt.num_survivors, 'update')}"
    return facts


def _open(attempt: admin_pb2.Round) -> str:
    """Summarize an open attempt."""
    lost = attempt.late + attempt.failed + attempt.rejected + attempt.dropped
    if not attempt.assigned:
        return f"it waits for {format_count(attempt.target, 'eligible client')}" if attempt.target else ""
    text = f"{attempt.reported:,} of {attempt.goal:,} reports are there"
    if step := describe_step(attempt.progress):
        text = step
    if attempt.busy:
        text += f", {attempt.busy:,} of {format_count(attempt.assigned, 'client')} are at work"
    return text + (f", {lost:,} were lost" if lost else "")
