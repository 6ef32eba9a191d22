"""What one table of a job file asks of the others. Each check raises `ValueError` with words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedplat import aggregate
from fedplat.job import private

if TYPE_CHECKING:
    from fedplat.job.spec import JobSpec


def check(spec: JobSpec) -> None:
    """Raises `ValueError` if the tables of a job contradict each other."""
    _check_rule(spec, spec.aggregation.build())
    if spec.robust is not None:
        _check_robust(spec, spec.robust)
    if spec.buffered is not None:
        _check_buffered(spec)
    if spec.privacy is not None:
        private.check(spec, spec.privacy)


def _check_rule(spec: JobSpec, rule: aggregate.Rule) -> None:
    name = spec.aggregation.__struct_config__.tag
    algorithm = rule.counterpart.algorithm
    if spec.updates.weighting != "uniform" and (rule.unit_weights or algorithm):
        raise ValueError(f'aggregation.rule = "{name}": it needs [updates] weighting = "uniform"')
    if algorithm and spec.config.get("algorithm") != algorithm:
        raise ValueError(
            f'aggregation.rule = "{name}": clients have to do their half of it; it needs [config] algorithm = '
            f'"{algorithm}"'
        )


def _check_buffered(spec: JobSpec) -> None:
    if spec.selection.sampling.is_trial:
        name = spec.selection.sampling.__struct_config__.tag
        raise ValueError(f'selection.sampling.policy = "{name}": it draws whole cohorts; expected mode.kind = "sync"')
    if spec.selection.close != "goal":
        raise ValueError(
            f'selection.close = "{spec.selection.close}": a buffer closes at its goal; expected mode.kind = "sync"'
        )


def _check_robust(spec: JobSpec, robust: aggregate.Robust) -> None:
    if type(spec.aggregation) not in aggregate.SERVER_OPTIMIZERS:
        known = ", ".join(str(each.__struct_config__.tag) for each in aggregate.SERVER_OPTIMIZERS)
        name = spec.aggregation.__struct_config__.tag
        raise ValueError(f"robust: goes with aggregation.rule = {known}; {name} has a mean of its own")
    selection = spec.selection
    name, most = ("goal", selection.goal)
    if selection.close == "deadline":  # whoever was assigned may report
        name, most = ("over_selection x goal", selection.target)
    if most > aggregate.MAX_GATHERED:
        raise ValueError(
            f"selection.{name} = {most}: expected at most {aggregate.MAX_GATHERED} with [robust], which reads the "
            "updates of an attempt side by side"
        )
    try:
        robust.check(selection.minimum)
    except ValueError as exc:
        raise ValueError(
            f"robust: {exc}: so many may close an attempt, ceil(min_fraction x goal); raise selection.goal or "
            "selection.min_fraction, or lower robust.byzantine"
        ) from exc
