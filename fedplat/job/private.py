"""What `[privacy]` asks of a job's other tables, and what it makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import structs

from fedplat import privacy
from fedplat.aggregate import SERVER_OPTIMIZERS
from fedplat.errors import JobFileError
from fedplat.job.sections import Updates
from fedplat.privacy import accounting
from fedplat.sampling import Poisson, Uniform
from fedplat.sampling.poisson import OVERFLOW

if TYPE_CHECKING:
    from fedplat.job.spec import JobSpec


def check(spec: JobSpec, options: privacy.Privacy) -> None:
    """Raises `ValueError`, with all that is wrong, if the job could not keep what it promises."""
    mistakes = [*_of_updates(spec), *_of_others(spec), *_of_participation(spec, options), *_of_clip(spec, options)]
    if mistakes:
        raise ValueError("privacy: " + "; ".join(mistakes))


def settled(spec: JobSpec) -> JobSpec:
    """The job with its noise calibrated, and with the number of releases that its budget is enough for.

    Takes about a second. Raises `JobFileError` if no noise is enough, `MissingExtraError` without the extra `privacy`.
    """
    options = spec.privacy
    if options is None:
        return spec
    most = spec.rounds if options.max_releases is None else min(spec.rounds, options.max_releases)
    try:
        if options.noise_multiplier is None:
            assert options.epsilon is not None
            whole = accounting.calibrate(
                mechanism_with(spec, 1.0), most, options.epsilon, options.delta
            ).noise_multiplier
            spec = _with(spec, noise_multiplier=options.of_model(whole))
        elif options.epsilon is not None:
            found = mechanism_with(spec, options.whole(options.noise_multiplier))
            most = accounting.max_releases(found, options.epsilon, options.delta, most)
            if not most:
                raise ValueError(
                    f"not even one release with noise_multiplier = {options.noise_multiplier:g} is within epsilon = "
                    f"{options.epsilon:g} at delta = {options.delta:g}; expected more of either"
                )
        return _with(spec, max_releases=most)
    except ValueError as exc:
        raise JobFileError(f"privacy: {exc}") from exc


def _with(spec: JobSpec, **changes: Any) -> JobSpec:
    assert spec.privacy is not None
    return structs.replace(spec, privacy=structs.replace(spec.privacy, **changes))


def mechanism(spec: JobSpec) -> privacy.Mechanism | None:
    """How a job's releases are made; None if it is not private, or its noise was not calibrated yet."""
    options = spec.privacy
    if options is None or options.noise_multiplier is None:
        return None
    return mechanism_with(spec, options.whole(options.noise_multiplier))


def mechanism_with(spec: JobSpec, whole: float) -> privacy.Mechanism:
    """How the releases of a private job would be made with this noise multiplier of a whole round."""
    assert spec.privacy is not None
    sampling = spec.selection.sampling
    if isinstance(sampling, Poisson):
        # OVERFLOW is the chance that the cap bites; given that one client is drawn it may be so much greater.
        overflow = min(1.0, OVERFLOW / sampling.rate)
        return privacy.Mechanism(
            kind="poisson", noise_multiplier=whole, sampling_probability=sampling.rate, overflow=overflow
        )
    return privacy.Mechanism(
        kind="tree" if spec.privacy.participation == "min_separation" else "fixed",
        noise_multiplier=whole,
        separation=spec.selection.min_separation + 1,
        max_participations=spec.privacy.max_participations,
    )


def release(spec: JobSpec) -> privacy.Release | None:
    """What makes a release of an attempt's sum; None if the job is not private."""
    options = spec.privacy
    if options is None:
        return None
    return privacy.Release(
        noise_multiplier=options.noise_multiplier,
        clip=spec.updates.adaptive_clip or spec.updates.clip_norm,
        expected_weight=spec.selection.goal * options.expected_weight,
        expected_reports=spec.selection.goal,
        count_deviation=options.count_deviation(spec.selection.goal),
        metrics=options.metrics,
        tree=privacy.Tree(spec.rounds) if options.participation == "min_separation" else None,
    )


def _of_updates(spec: JobSpec) -> Iterator[str]:
    updates = spec.updates
    if not (updates.clip_norm or updates.adaptive_clip):
        yield "what one client changes needs a bound; expected updates.clip_norm or updates.adaptive_clip"
    if updates.weighting == "examples" and updates.max_examples >= Updates().max_examples:
        yield (
            f"updates.max_examples = {updates.max_examples:g}: a client with so many examples weighs 1, and all others "
            'less; expected a number that many clients have, or weighting = "uniform"'
        )
    for name in ("max_norm", "outlier_factor", "max_weight_factor"):
        if value := getattr(updates, name):
            yield (
                f"updates.{name} = {value:g}: expected 0, since what a client counts for would depend on what it and "
                "the others sent; clipping bounds each update, and no weight is above 1"
            )


def _of_others(spec: JobSpec) -> Iterator[str]:
    if type(spec.aggregation) not in SERVER_OPTIMIZERS:
        known = ", ".join(str(each.__struct_config__.tag) for each in SERVER_OPTIMIZERS)
        name = spec.aggregation.__struct_config__.tag
        yield f'aggregation.rule = "{name}": expected {known}; others have a mean of their own'
    if spec.robust is not None:
        yield "robust: expected none, since what one client changes in such a rule's result has no small bound"
    if spec.buffered is not None:
        yield 'mode.kind = "buffered": expected "sync", since a buffer closes at a number of reports'
    if spec.evaluation.clients is not None:
        yield "evaluation.clients: expected none, since its results would be releases without noise"
    if spec.deadlines.adaptive is not None:
        yield "deadlines.adaptive: expected none, since it tells clients how long others took"


def _of_participation(spec: JobSpec, options: privacy.Privacy) -> Iterator[str]:
    selection, kind = spec.selection, options.participation
    if selection.close != "deadline":
        yield 'selection.close = "goal": expected "deadline", since the fastest would be in the model for certain'
    expected, policy = Poisson if kind == "poisson" else Uniform, selection.sampling
    if type(policy) is not expected:
        yield (
            f'selection.sampling.policy = "{policy.__struct_config__.tag}": expected '
            f'"{expected.__struct_config__.tag}" with participation = "{kind}"'
        )
    if kind == "poisson":
        if not selection.wait_for:
            yield "selection.wait_for: expected the number of clients that must wait before any is drawn"
        if selection.min_separation or options.max_participations:
            yield (
                "expected neither selection.min_separation nor privacy.max_participations with participation = "
                '"poisson": who must rest is not drawn by a trial'
            )
    if kind == "min_separation" and not selection.min_separation:
        yield 'selection.min_separation: expected rounds above 0 with participation = "min_separation"'


def _of_clip(spec: JobSpec, options: privacy.Privacy) -> Iterator[str]:
    if spec.updates.adaptive_clip is None:
        return
    if options.participation == "min_separation":
        yield (
            "updates.adaptive_clip: expected updates.clip_norm, since the noise of a tree goes over all rounds and "
            "needs one bound"
        )
    goal, multiplier = spec.selection.goal, options.noise_multiplier
    if multiplier is not None and 2.0 * options.count_deviation(goal) <= multiplier:
        yield (
            f"updates.adaptive_clip: expected selection.goal above {10 * multiplier:g}, ten times the noise "
            f"multiplier, not {goal}: else the count that it follows leaves nothing to the updates"
        )
