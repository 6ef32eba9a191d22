"""What one table of a job file asks of the others. Each check raises `ValueError` with words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedplat import aggregate
from fedplat.job import private

if TYPE_CHECKING:
    from fedplat.job.pool import ServerStep
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
    if spec.pool is not None and spec.durability == "memory":
        raise ValueError('pool: its ranks read the updates from the spool; expected durability = "spool"')
    if spec.server_step is not None:
        _check_server_step(spec, spec.server_step)


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


def _check_server_step(spec: JobSpec, step: ServerStep) -> None:
    if spec.compression.downlink is not None:
        raise ValueError(
            "server_step: a version would not be the one before plus the encoded step; expected no compression.downlink"
        )
    if step.method == "train":
        return
    contrary = {
        'durability = "memory"': spec.durability == "memory",
        "privacy": spec.privacy is not None,
        "robust": spec.robust is not None,
        'mode.kind = "buffered"': spec.buffered is not None,
    }
    if found := [name for name, is_so in contrary.items() if is_so]:
        raise ValueError(
            f'server_step.method = "distill": it looks at the model of each client of a round, which {found[0]} '
            'excludes; expected "train"'
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
