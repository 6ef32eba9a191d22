"""How much one client may change: which updates are refused or dropped, and what one may weigh. Pure functions.

Reports are claims. Before an attempt commits, each is compared with the median of all: an update whose norm is more
than `outlier_factor` times the median norm is dropped, and none counts for more than `max_weight_factor` times the
median number of examples. The median is the lower one of two in the middle, so that of two clients the one that claims
less sets the bound.

The sum is made while reports come, and the median is known at the end only. So what is found then takes the sum to be
made anew (`Restart`), of the updates in the spool. Where these are gone (`durability = "memory"`), and where an attempt
may have fewer than `FEWEST` reports, the job remembers what its clients claimed last, and a report is judged by that
as it comes. Refused reports are remembered too, with one voice for each client: if the norms of most clients grow
a thousand times, they are outliers once, and the measure from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_low

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.rounds.assignments import end
from fedplat.rounds.records import Assignment, Attempt, Claim, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind, Reason
from fedplat.rounds.transition import ACCEPTED, Verdict

MIN_REPORTS_FOR_MEDIAN = 3
"""Of two norms none is an outlier."""
MAX_CLAIMS = 100
"""Of how many clients a job remembers what they claimed last."""
MAX_SUM = 1e30
"""Norm times weight of all updates of an attempt together: their float32 sums stay in range, with room for a rule."""
_TOLERANCE = 2.0
"""How far a weight may be above its bound where it cannot be changed any more: the median moved since it was set."""
_NAMED = 3


def can_refold(spec: JobSpec) -> bool:
    """Return whether the updates of an attempt are there until it ends, so that its sum can be made anew."""
    return spec.durability == "spool" or spec.robust is not None


def may_refold(spec: JobSpec) -> bool:
    """Return whether the sum of an attempt may be made anew because of the claims of its clients."""
    return can_refold(spec) and _is_on(spec)


def looks_back(spec: JobSpec) -> bool:
    """Return whether a job remembers the claims of its clients: where an attempt alone cannot judge its reports."""
    return _is_on(spec) and (not can_refold(spec) or spec.selection.minimum < MIN_REPORTS_FOR_MEDIAN)


def remember_claim(job: JobState, reported: Assignment) -> JobState:
    """Remember a client's claim, in place of its earlier one."""
    if not looks_back(job.spec):
        return job
    others = [claim for claim in job.claims if claim.client_id != reported.client_id]
    claims = (*others, Claim(reported.client_id, reported.norm, reported.num_examples))
    return structs.replace(job, claims=claims[-MAX_CLAIMS:])


def judge_norm(job: JobState, attempt: Attempt, reported: Assignment) -> Verdict:
    """Return whether a report, whose claim is remembered already, is acceptable by its norm."""
    spec, norm = job.spec, reported.norm
    if norm is None:
        return ACCEPTED
    if spec.updates.max_norm and norm > spec.updates.max_norm:
        text = f"the update's norm is {norm:.6g}; the job accepts at most updates.max_norm = {spec.updates.max_norm:g}"
        return Verdict(Reason.REJECTED_NORM, text)
    weight = spec.weight(reported.num_examples, 0, limit_by_claims(job))
    bound = MAX_SUM / max(attempt.target, attempt.goal)
    if not spec.updates.clips and spec.robust is None and norm * weight > bound:
        text = f"the update's norm is {norm:.6g} and its weight {weight:.6g}; their product may be {bound:.3g} at most"
        return Verdict(Reason.REJECTED_NORM, text)
    if spec.outlier_factor and _judges_reports(spec):
        median = _median(claim.norm for claim in job.claims)
        if median and norm > spec.outlier_factor * median:
            return Verdict(Reason.REJECTED_OUTLIER, _text(spec, norm, median, "of the job's latest updates"))
    return ACCEPTED


def limit_by_claims(job: JobState) -> float:
    """Return for how many examples a report may count by the remembered claims; infinitely many if they are too few."""
    if not _judges_reports(job.spec) or len(job.claims) < MIN_REPORTS_FOR_MEDIAN:
        return math.inf
    return limit_examples(job.spec, [claim.num_examples for claim in job.claims])


def find_outliers(job: JobState, attempt: Attempt) -> list[Assignment]:
    """Return the reports of an attempt that are dropped before it commits, as they are then."""
    spec = job.spec
    if attempt.kind is not AttemptKind.TRAIN or not spec.outlier_factor:
        return []
    reported, whose = attempt.reported, "of the attempt's updates"
    norms = [each.norm for each in reported]
    if not _judges_alone(spec, norms):
        norms, whose = [claim.norm for claim in job.claims], "of the job's latest updates"
    median = _median(norms)
    if not median:
        return []
    return [
        end(each, AssignmentState.REJECTED, Reason.REJECTED_OUTLIER, _text(spec, each.norm, median, whose))
        for each in reported
        if each.norm is not None and each.norm > spec.outlier_factor * median
    ]


def reweigh(job: JobState, attempt: Attempt) -> list[Assignment]:
    """Return the reports of an attempt whose weight differs from what was known when they came, with that weight."""
    spec = job.spec
    if not spec.max_weight_factor or not attempt.num_reported:
        return []
    reported = attempt.reported
    examples = [each.num_examples for each in reported]
    if attempt.kind is AttemptKind.TRAIN and not _judges_alone(spec, examples) and len(job.claims) >= MIN_REPORTS_FOR_MEDIAN:
        examples = [claim.num_examples for claim in job.claims]
    most = limit_examples(spec, examples)
    moved = [(each, spec.weight(each.num_examples, each.staleness, most)) for each in reported]
    return [structs.replace(each, weight=weight) for each, weight in moved if weight != each.weight]


def describe_too_heavy(attempt: Attempt, weights: Iterable[Assignment]) -> list[str]:
    """Describe the updates that weigh far more than they should; `weights` are the reports as they should count."""
    return [
        f"{each.client_id} (weight {was.weight:.6g}, of at most {each.weight:.6g})"
        for each in weights
        if (was := attempt.assignments[each.client_id]).weight > _TOLERANCE * each.weight
    ]


def has_dropped_folds(attempt: Attempt) -> bool:
    """Return whether the attempt's sum has updates in it that do not count any more."""
    dropped = (Reason.REJECTED_OUTLIER, Reason.REVOKED)  # what a crash has lost is in no sum
    return any(each.folded_into == attempt.key and each.reason in dropped for each in attempt.assignments.values())


def describe_outliers(attempt: Attempt) -> str:
    """Describe the updates of an attempt that were dropped as outliers; empty if there are none."""
    found = [each for each in attempt.assignments.values() if each.reason is Reason.REJECTED_OUTLIER]
    return join_texts([f"{each.client_id}: {each.text}" for each in found])


def join_texts(texts: Sequence[str]) -> str:
    """Join the first of several texts, and the number of the others."""
    more = len(texts) - _NAMED
    return "; ".join(texts[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def limit_examples(spec: JobSpec, num_examples: Sequence[float]) -> float:
    """Return for how many examples a report may count beside these, itself among them."""
    if not spec.max_weight_factor or not num_examples:
        return math.inf
    return spec.max_weight_factor * median_low(min(each, spec.updates.max_examples) for each in num_examples)


def judges_each_update(spec: JobSpec, num_reports: int) -> bool:
    """Return whether the reports of an attempt of so many are all that decides their weights."""
    return can_refold(spec) and (num_reports >= MIN_REPORTS_FOR_MEDIAN or not looks_back(spec))


def _is_on(spec: JobSpec) -> bool:
    return spec.outlier_factor > 0.0 or spec.max_weight_factor > 0.0


def _judges_reports(spec: JobSpec) -> bool:
    """Return whether reports are judged as they come: at the close it is too late, or there are too few."""
    return looks_back(spec) and (not can_refold(spec) or spec.selection.goal < MIN_REPORTS_FOR_MEDIAN)


def _judges_alone(spec: JobSpec, reports: Sequence[float | None]) -> bool:
    return judges_each_update(spec, len(reports))


def _median(norms: Iterable[float | None]) -> float:
    """Return the median of the norms that are known; 0 if they are too few."""
    known = [norm for norm in norms if norm is not None]
    return median_low(known) if len(known) >= MIN_REPORTS_FOR_MEDIAN else 0.0


def _text(spec: JobSpec, norm: float | None, median: float, whose: str) -> str:
    return f"its norm is {norm:.6g}, more than {spec.outlier_factor:g} times {median:.6g}, the median {whose}"
