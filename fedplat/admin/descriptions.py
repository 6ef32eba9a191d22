"""What a server reports, in words for commands and pages: the funnel of an attempt, and what it waits for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from google.protobuf.descriptor import EnumDescriptor

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
class FunnelStage:
    """A stage of a round. `count` is None if the server does not know it, or if the attempt is not there yet.

    `meaning` describes the clients that came to it; `loss` names what did not happen to those that are missing from
    here on.
    """

    name: str
    count: int | None
    meaning: str
    loss: str = ""


def funnel_stages(attempt: admin_pb2.Round) -> Sequence[FunnelStage]:
    """Return the stages of an attempt, from the clients that checked in to the merged updates."""
    is_committed = attempt.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED
    named = (
        FunnelStage("checked in", attempt.checked_in, "clients of the population that were waiting"),
        FunnelStage("eligible", attempt.eligible, "of these, clients that may be selected", "could not be selected"),
        FunnelStage("selected", attempt.assigned, "clients that got an assignment"),
        FunnelStage("downloaded", attempt.downloaded, "clients that received the model", "did not receive the model"),
        FunnelStage(
            "trained",
            attempt.trained,
            "clients that completed the training",
            "received the model but did not complete the training",
        ),
        FunnelStage(
            "reported",
            attempt.reported,
            "clients whose update was accepted",
            "completed the training, but their update was not accepted",
        ),
        FunnelStage(
            "merged",
            attempt.merged if is_committed else None,
            "updates in the committed version",
            "reported, but the version was made without them",
        ),
    )
    if attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE:
        named = named[:-1]
    # A later stage is never empty without reason: 0 before a number means that the server did not count.
    last = max((at for at, stage in enumerate(named) if stage.count), default=-1)
    return [
        dataclasses.replace(stage, count=None) if not stage.count and at < last else stage
        for at, stage in enumerate(named)
    ]


def largest_loss(attempt: admin_pb2.Round) -> str:
    """Return a sentence that names the stage at which an attempt lost the most clients; empty if it lost none."""
    if attempt.phase not in ENDED:
        return _open(attempt)
    if attempt.assigned < attempt.target and (attempt.eligible or not attempt.assigned):
        rest = f" of the {attempt.checked_in:,} that had checked in" if attempt.checked_in else ""
        return f"{attempt.target:,} clients were wanted, but only {attempt.eligible:,}{rest} were eligible"
    worst, before, skips = ("", 0, 0), 0, False
    for stage in funnel_stages(attempt)[FIRST_OF_COHORT:]:
        if stage.count is None:
            skips = True  # it is not known at which of the stages the clients were lost
            continue
        if stage.loss and before - stage.count > worst[1]:
            worst = (f"did not come to the stage {stage.name!r}" if skips else stage.loss, before - stage.count, before)
        before, skips = stage.count, False
    loss, count, base = worst
    if 0 < count <= attempt.surplus:
        return f"no loss: {format_count(attempt.surplus, 'client')} more than needed, since the goal was reached"
    return f"the largest loss: {count:,} of {format_count(base, 'client')} {loss}" if count else ""


def name_step(progress: admin_pb2.AttemptProgress) -> str:
    """Return what the clients of an attempt do together in a step, as the verb of a sentence."""
    is_exchange = progress.step.phase in (admin_pb2.ATTEMPT_PHASE_EXCHANGING, admin_pb2.ATTEMPT_PHASE_REDUCING)
    return "exchanges models" if is_exchange else "aggregates securely"


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


def describe_wait(attempt: admin_pb2.Round, moment: Callable[[float], str]) -> str:
    """Return for whom an open attempt waits and until when, such as `waits for c-1 (silent) until 20:11:43`.

    `moment` formats a time. Empty if the attempt waits for no client.
    """
    if not attempt.HasField("waiting"):
        return ""
    return describe_waiting(attempt.waiting, attempt.busy, moment)


def describe_waiting(waits: admin_pb2.AttemptWait, num_busy: int, moment: Callable[[float], str]) -> str:
    """Return the same for `num_busy` clients at work; if the number is not known, 0."""
    silent, named = set(waits.silent_client_ids), list(waits.client_ids)
    if not named:
        whom = "waits for clients to check in"
    elif num_busy > len(named):
        whom = f"waits for {format_count(num_busy, 'client')}"
        whom += f", of which {', '.join(sorted(silent))} {'is' if len(silent) == 1 else 'are'} silent" if silent else ""
    else:
        whom = "waits for " + ", ".join(f"{name} (silent)" if name in silent else name for name in named)
    return f"{whom} until {moment(waits.until_unix_s)}" if waits.until_unix_s else whom


def describe_exchange(exchange: admin_pb2.Exchange) -> str:
    """Describe the exchanges of a decentralised job: the topology, the silos, the edges, and how far apart they are."""
    kind = "ring all-reduce" if exchange.kind == "ring" else f"{exchange.kind}, topology {exchange.topology}"
    text = f"{kind}, {format_count(exchange.num_silos, 'silo')}"
    if exchange.num_edges:
        text += f", {exchange.num_confirmed:,} of {format_count(exchange.num_edges, 'edge')} confirmed last"
    if exchange.HasField("relative_distance"):
        text += f"; distance from the mean {exchange.relative_distance:.3g}"
        if exchange.kind != "ring":  # a ring needs none: it computes the mean whatever the distance is
            text += f" (tolerance {exchange.tolerance:g})"
    if exchange.excluded:
        text += f"; rings leave out {', '.join(exchange.excluded)}"
    return text


def count_settling(number: int, num_rounds: int) -> int:
    """Return how many of the rounds so far had no training: those of a decentralised job after its last training.

    `num_rounds` is that of the job; 0 if a Flower app decides.
    """
    return max(0, number - num_rounds) if num_rounds else 0


def join_names(names: Sequence[str], total: int) -> str:
    """Join the first names of `total` ones."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """Return the name of an enum value without the enum's own name: `RUNNING` for `JOB_STATUS_RUNNING`."""
    value = enum.values_by_number.get(number)
    if value is None:  # from a newer server
        return str(number)
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
    return str(value.name).removeprefix(f"{prefix}_")


def job_status(status: int) -> str:
    """Return the name of a job status: `RUNNING`."""
    return enum_name(admin_pb2.JobStatus.DESCRIPTOR, status)


def attempt_phase(phase: int) -> str:
    """Return the name of an attempt phase: `COLLECTING`."""
    return enum_name(admin_pb2.AttemptPhase.DESCRIPTOR, phase)


def attempt_kind(kind: int, job: admin_pb2.Job | None = None) -> str:
    """Return the name of an attempt kind in lower case: `train`, `warm start`.

    What the job of a Flower app, which has no number of rounds, does before round 1 is the start of its app.
    """
    if kind == admin_pb2.ATTEMPT_KIND_WARM_START and job is not None and not job.num_rounds:
        return "app start"
    return enum_name(admin_pb2.AttemptKind.DESCRIPTOR, kind).lower().replace("_", " ")


def severity(value: int) -> str:
    """Return the severity of an alert in lower case: `critical`."""
    return enum_name(admin_pb2.AlertSeverity.DESCRIPTOR, value).lower()


def describe_approvals(found: admin_pb2.JobApprovals) -> str:
    """Summarize what the owners of a population's clients have decided of a job."""
    names = f": {join_names(found.approved, found.num_approved)}" if found.num_approved else ""
    return f"{found.num_approved:,} approved{names}; {found.num_rejected:,} rejected, {found.num_silent:,} undecided"
