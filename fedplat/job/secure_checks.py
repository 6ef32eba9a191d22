"""The checks of a job with `[secure_aggregation]`: whether the server needs anything but sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedplat import aggregate
from fedplat.config.plugins import build_checked, name_of
from fedplat.job import combinations, sections, secure, tables
from fedplat.secure_aggregation.options import MIN_GROUP, SecureAggregation
from fedplat.secure_aggregation.setup import MIN_CLIP

RULES_ON_MEAN = ", ".join(name for name, each in aggregate.RULES.items() if each.works_on_mean)
"""The built-in rules that need only the mean of the updates."""
_SHARED_MASKS = 'expected "sync", since clients share masks for one attempt'
REASONS: Mapping[str, str] = {
    combinations.BUFFERED: _SHARED_MASKS,
    combinations.STALE_SYNCHRONOUS: _SHARED_MASKS,
    "robust": "expected none, since such a rule compares the updates of single clients",
    combinations.UPLINK: "expected none, since masked updates cannot be compressed",
    combinations.OF_CLIENTS: "expected none, since these metrics would reach the server without masks",
    combinations.DISTILL: 'expected "train", since it uses the model of each client',
    "pool": "expected none, since masked updates are added by the server's own process",
}


def check_secure(spec: tables.JobTables, options: SecureAggregation) -> None:
    """Raise `ValueError`, with all mistakes in one message, if the server would need the updates of single clients."""
    mistakes = [
        *_updates_mistakes(spec),
        *_policy_mistakes(spec),
        *combinations.explain(spec, "secure_aggregation", REASONS),
        *_group_mistakes(spec, options),
        *_privacy_mistakes(spec, options),
    ]
    if mistakes:
        raise ValueError("secure_aggregation: " + "; ".join(mistakes))


def _updates_mistakes(spec: tables.JobTables) -> Iterator[str]:
    updates = spec.updates
    if updates.adaptive_clip is not None:
        yield "updates.adaptive_clip: expected updates.clip_norm, since the server does not learn the norms"
    elif updates.clip_norm < MIN_CLIP:
        yield f"updates.clip_norm = {updates.clip_norm:g}: expected a bound, which is the range of the quantizer"
    if updates.weighting == "examples" and updates.max_examples >= sections.Updates().max_examples:
        yield (
            f"updates.max_examples = {updates.max_examples:g}: a client with so many examples weighs 1, and all others "
            'less; expected a number that many clients have, or weighting = "uniform"'
        )
    for name in ("max_norm", "outlier_factor", "max_weight_factor"):
        if value := getattr(updates, name):
            yield f"updates.{name} = {value:g}: expected 0, since the server cannot compare updates"


def _policy_mistakes(spec: tables.JobTables) -> Iterator[str]:
    name = name_of(spec.aggregation)
    if not spec.aggregation.works_on_mean:
        yield f'aggregation.rule = "{name}": expected {RULES_ON_MEAN}; others need the update of each client'
    elif metrics := build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule").metrics:
        yield (
            f'aggregation.rule = "{name}": expected a rule that needs no metrics of single clients, and this one needs '
            f"{', '.join(sorted(metrics))}"
        )
    if spec.selection.uses_history:
        yield (
            f'selection.sampling.policy = "{name_of(spec.selection.sampling)}": expected a policy that does not use '
            "what single clients reported"
        )


def _group_mistakes(spec: tables.JobTables, options: SecureAggregation) -> Iterator[str]:
    goal, groups = spec.selection.goal, secure.num_groups(spec)
    if goal // groups < MIN_GROUP:
        yield (
            f"selection.goal = {goal}: expected at least {MIN_GROUP} clients in each of {groups} groups, since from "
            "the sum of two updates each client would know the other's"
        )
    most = secure.group_maximum(spec)
    if not _has_local_noise(spec) and most * (2**options.bits - 1) >= 2**options.modulus:
        yield (
            f"bits = {options.bits}: the sum of {most} clients would not fit modulus = {options.modulus}; expected "
            f"{most} x (2^bits - 1) below 2^modulus, so fewer bits, a larger modulus or a smaller group"
        )


def _privacy_mistakes(spec: tables.JobTables, options: SecureAggregation) -> Iterator[str]:
    if spec.privacy is None:
        return
    if spec.privacy.trust == "server":
        yield (
            'privacy.trust = "server": expected "none", with which clients add the noise; the server would add it '
            "to sums that depend on the number of survivors"
        )
    elif options.metrics:
        yield 'metrics: expected [privacy.metrics] with privacy.trust = "none", whose values have noise'


def _has_local_noise(spec: tables.JobTables) -> bool:
    return spec.privacy is not None and spec.privacy.trust == "none"
