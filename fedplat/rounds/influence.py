"""Limits on the influence of one client: which updates are refused or dropped, and their weights. Pure functions.

Reports are claims of clients. Before an attempt commits, each is compared with the median of all: an update whose norm
is more than `outlier_factor` times the median norm is dropped, and none counts for more than `max_weight_factor` times
the median number of examples. For an even number of reports the median is the lower of the two middle ones, so that of
two clients the one with the lower claim sets the bound.

Updates are summed as reports arrive, but the median is known only at the end. A correction then requires a new sum
(`Restart`) of the updates in the spool. If these are not kept (`durability = "memory"`), or if an attempt may have
fewer than `MIN_REPORTS_FOR_MEDIAN` reports, the job remembers the last claim of its clients and judges each report by
them on arrival. Claims of refused reports are remembered, too, one per client: if the norms of most clients grow a
thousandfold, they are outliers once, and afterwards determine the median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_low

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.rounds.commands import ACCEPTED, Verdict, end_assignment
from fedplat.rounds.records import Assignment, Attempt, Claim, JobState
from fedplat.rounds.states import HAVE_UPDATES, AssignmentState, Reason

MIN_REPORTS_FOR_MEDIAN = 3
"""With fewer norms, none is an outlier: of two, either could be the wrong one."""
MAX_CLAIMS = 100
"""Number of clients whose last claims a job remembers."""
MAX_SUM = 1e30
"""Bound on the sum of norm times weight over all updates of an attempt: float32 sums stay in range, with a margin."""
_TOLERANCE = 2.0
"""Factor by which a weight that is fixed may exceed its bound, since the median moves after the weight was set."""
_NAMED = 3


def keeps_updates(spec: JobSpec) -> bool:
    """Return whether updates are kept until their attempt ends, so that its sum can be computed again."""
    return spec.durability == "spool" or spec.robust is not None


def may_need_refold(spec: JobSpec) -> bool:
    """Return whether the claims of clients may cause the sum of an attempt to be computed again."""
    return keeps_updates(spec) and _is_on(spec)


def looks_back(spec: JobSpec) -> bool:
    """Return whether a job remembers its clients' claims, because one attempt is not enough to judge its reports."""
    return _is_on(spec) and (not keeps_updates(spec) or spec.selection.minimum < MIN_REPORTS_FOR_MEDIAN)


def remember_claim(job: JobState, reported: Assignment) -> JobState:
    """Remember a client's claim, replacing its earlier one."""
    if not looks_back(job.spec):
        return job
    others = [claim for claim in job.claims if claim.client_id != reported.client_id]
    claims = (*others, Claim(reported.client_id, reported.norm, reported.num_examples))
    return structs.replace(job, claims=claims[-MAX_CLAIMS:])


def judge_norm(job: JobState, attempt: Attempt, reported: Assignment) -> Verdict:
    """Return whether the norm of a report, whose claim is remembered already, is acceptable."""
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
    """Return the limit of examples by the remembered claims; infinity if there are too few claims."""
    if not _judges_reports(job.spec) or len(job.claims) < MIN_REPORTS_FOR_MEDIAN:
        return math.inf
    return limit_examples(job.spec, [claim.num_examples for claim in job.claims])


def find_outliers(job: JobState, attempt: Attempt) -> list[Assignment]:
    """Return the reports of an attempt that must be dropped before it commits, in their new state."""
    spec = job.spec
    if attempt.kind not in HAVE_UPDATES or not spec.outlier_factor:
        return []
    reported, whose = attempt.reported, "of the attempt's updates"
    norms = [each.norm for each in reported]
    if not _judges_alone(spec, norms):
        norms, whose = [claim.norm for claim in job.claims], "of the job's latest updates"
    median = _median(norms)
    if not median:
        return []
    return [
        end_assignment(each, AssignmentState.REJECTED, Reason.REJECTED_OUTLIER, _text(spec, each.norm, median, whose))
        for each in reported
        if each.norm is not None and each.norm > spec.outlier_factor * median
    ]


def reweigh(job: JobState, attempt: Attempt) -> list[Assignment]:
    """Return the reports of an attempt whose weight must change at its end, with the new weight."""
    spec = job.spec
    if not spec.max_weight_factor or not attempt.num_reported:
        return []
    reported = attempt.reported
    examples = [each.num_examples for each in reported]
    if attempt.kind in HAVE_UPDATES and not _judges_alone(spec, examples) and len(job.claims) >= MIN_REPORTS_FOR_MEDIAN:
        examples = [claim.num_examples for claim in job.claims]
    most = limit_examples(spec, examples)
    changed = [(each, spec.weight(each.num_examples, each.staleness, most)) for each in reported]
    return [structs.replace(each, weight=weight) for each, weight in changed if weight != each.weight]


def describe_too_heavy(attempt: Attempt, weights: Iterable[Assignment]) -> list[str]:
    """Describe the updates whose weight is far above its bound; `weights` are the reports with their new weights."""
    return [
        f"{each.client_id} (weight {was.weight:.6g}, of at most {each.weight:.6g})"
        for each in weights
        if (was := attempt.assignments[each.client_id]).weight > _TOLERANCE * each.weight
    ]


def has_dropped_folds(attempt: Attempt) -> bool:
    """Return whether the attempt's sum contains updates that no longer count."""
    dropped = (Reason.REJECTED_OUTLIER, Reason.REVOKED)  # updates lost in a crash are in no sum
    return any(each.folded_into == attempt.key and each.reason in dropped for each in attempt.assignments.values())


def describe_outliers(attempt: Attempt) -> str:
    """Describe the updates of an attempt that were dropped as outliers; empty without outliers."""
    found = [each for each in attempt.assignments.values() if each.reason is Reason.REJECTED_OUTLIER]
    return join_texts([f"{each.client_id}: {each.text}" for each in found])


def join_texts(texts: Sequence[str]) -> str:
    """Join the first few texts, and state the number of the others."""
    more = len(texts) - _NAMED
    return "; ".join(texts[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def limit_examples(spec: JobSpec, num_examples: Sequence[float]) -> float:
    """Return the limit of examples of one report, from the claims of all reports (its own included)."""
    if not spec.max_weight_factor or not num_examples:
        return math.inf
    return spec.max_weight_factor * median_low(min(each, spec.updates.max_examples) for each in num_examples)


def judges_each_update(spec: JobSpec, num_reports: int) -> bool:
    """Return whether the weights of `num_reports` reports depend on the reports of their attempt alone."""
    return keeps_updates(spec) and (num_reports >= MIN_REPORTS_FOR_MEDIAN or not looks_back(spec))


def _is_on(spec: JobSpec) -> bool:
    return spec.outlier_factor > 0.0 or spec.max_weight_factor > 0.0


def _judges_reports(spec: JobSpec) -> bool:
    """Return whether reports are judged on arrival, because at the close it is too late or reports are too few."""
    return looks_back(spec) and (not keeps_updates(spec) or spec.selection.goal < MIN_REPORTS_FOR_MEDIAN)


def _judges_alone(spec: JobSpec, reports: Sequence[float | None]) -> bool:
    return judges_each_update(spec, len(reports))


def _median(norms: Iterable[float | None]) -> float:
    """Return the median of the known norms; 0 if there are too few."""
    known = [norm for norm in norms if norm is not None]
    return median_low(known) if len(known) >= MIN_REPORTS_FOR_MEDIAN else 0.0


def _text(spec: JobSpec, norm: float | None, median: float, whose: str) -> str:
    return f"its norm is {norm:.6g}, more than {spec.outlier_factor:g} times {median:.6g}, the median {whose}"
