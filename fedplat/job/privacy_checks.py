"""The checks of a job with `[privacy]`: whether it can keep its promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedplat import codecs, privacy, sampling
from fedplat.config.plugins import name_of
from fedplat.flower.rule import FlowerAggregation
from fedplat.job import combinations, sections, secure, tables
from fedplat.job.secure_checks import RULES_ON_MEAN

_CLOSES_EARLY = 'expected "sync", since a buffer closes at a number of reports'
REASONS: Mapping[str, str] = {
    combinations.BUFFERED: _CLOSES_EARLY,
    combinations.STALE_SYNCHRONOUS: _CLOSES_EARLY,
    "robust": "expected none, since the influence of one client on the result of such a rule has no small bound",
    combinations.OF_CLIENTS: "expected none, since its results would be releases without noise",
}


def check_privacy(spec: tables.JobTables, options: privacy.Privacy) -> None:
    """Raise `ValueError`, with all mistakes in one message, if the job could not keep its privacy guarantee."""
    mistakes = [
        *_updates_mistakes(spec),
        *_other_mistakes(spec),
        *_participation_mistakes(spec, options),
        *_clip_mistakes(spec, options),
        *_trust_mistakes(spec, options),
    ]
    if mistakes:
        raise ValueError("privacy: " + "; ".join(mistakes))


def _updates_mistakes(spec: tables.JobTables) -> Iterator[str]:
    updates = spec.updates
    if not (updates.clip_norm or updates.adaptive_clip):
        yield "the influence of one client needs a bound; expected updates.clip_norm or updates.adaptive_clip"
    if updates.weighting == "examples" and updates.max_examples >= sections.Updates().max_examples:
        yield (
            f"updates.max_examples = {updates.max_examples:g}: a client with so many examples weighs 1, and all others "
            'less; expected a number that many clients have, or weighting = "uniform"'
        )
    for name in ("max_norm", "outlier_factor", "max_weight_factor"):
        if value := getattr(updates, name):
            yield (
                f"updates.{name} = {value:g}: expected 0, since the weight of a client would depend on the updates of "
                "all clients; clipping bounds each update, and no weight is above 1"
            )


def _other_mistakes(spec: tables.JobTables) -> Iterator[str]:
    if isinstance(spec.aggregation, FlowerAggregation):
        yield (
            f'aggregation.rule = "flower": expected {RULES_ON_MEAN}; a Flower strategy sees the model of each client, '
            "before any noise, and keeps what it likes of it"
        )
    elif not spec.aggregation.works_on_mean:
        yield (
            f'aggregation.rule = "{name_of(spec.aggregation)}": expected {RULES_ON_MEAN}; others have a mean of '
            "their own"
        )
    yield from combinations.explain(spec, "privacy", REASONS)
    if (codec := spec.compression.uplink) is not None and type(codec) not in codecs.CODECS.values():
        # Clipping reads an update twice, and its bound holds for each update alone.
        yield (
            f'compression.uplink.codec = "{name_of(codec)}": expected {", ".join(codecs.CODECS)}, since the bound on a '
            "client's influence depends on how its update is decoded"
        )
    if spec.deadlines.adaptive is not None:
        yield "deadlines.adaptive: expected none, since it reveals to clients how long others took"


def _participation_mistakes(spec: tables.JobTables, options: privacy.Privacy) -> Iterator[str]:
    selection, kind = spec.selection, options.participation
    if selection.close != "deadline" and options.trust == "server":
        yield 'selection.close = "goal": expected "deadline", since the fastest would certainly be in the model'
    expected, policy = sampling.Poisson if kind == "poisson" else sampling.Uniform, selection.sampling
    if type(policy) not in (expected,):  # not even a subclass, which may draw in another way
        yield (
            f'selection.sampling.policy = "{name_of(policy)}": expected '
            f'"{expected.__struct_config__.tag}" with participation = "{kind}"'
        )
    if kind == "poisson":
        if not selection.wait_for:
            yield "selection.wait_for: expected the number of clients that must wait before any is drawn"
        if selection.min_separation or options.max_participations:
            yield (
                "expected neither selection.min_separation nor privacy.max_participations with participation = "
                '"poisson": a client that must rest is not drawn by a trial'
            )
    if kind == "min_separation" and not selection.min_separation:
        yield 'selection.min_separation: expected rounds above 0 with participation = "min_separation"'


def _clip_mistakes(spec: tables.JobTables, options: privacy.Privacy) -> Iterator[str]:
    if spec.updates.adaptive_clip is None:
        return
    if options.participation == "min_separation":
        yield (
            "updates.adaptive_clip: expected updates.clip_norm, since the noise of a tree spans all rounds and needs "
            "one bound"
        )
    goal, multiplier = spec.selection.goal, options.noise_multiplier
    if multiplier is not None and 2.0 * options.count_deviation(goal) <= multiplier:
        yield (
            f"updates.adaptive_clip: expected selection.goal above {10 * multiplier:g}, ten times the noise "
            f"multiplier, not {goal}: otherwise the count that it follows uses up the budget"
        )


def _trust_mistakes(spec: tables.JobTables, options: privacy.Privacy) -> Iterator[str]:
    if options.trust == "server":
        return
    if spec.secure_aggregation is None:
        yield 'trust = "none": expected [secure_aggregation], without which the server sees the updates'
        return
    if options.participation != "fixed":
        yield (
            f'participation = "{options.participation}": expected "fixed" with trust = "none", since the server knows '
            "who takes part"
        )
    if options.max_participations:
        yield (
            f'max_participations = {options.max_participations}: expected 0 with trust = "none", since another attempt '
            "at a round may have the same clients, and both are releases"
        )
    if options.noise_multiplier is not None:
        try:
            secure.least_steps(spec, options.noise_multiplier)
        except ValueError as exc:
            yield str(exc)
