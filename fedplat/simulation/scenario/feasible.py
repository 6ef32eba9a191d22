"""What can be known before a simulation starts: whether it supports the job, and has the clients for its rounds."""

from __future__ import annotations

import numpy as np

from fedplat import aggregate, codecs, job
from fedplat.config import label_expressions, plugins, toml
from fedplat.errors import JobFileError
from fedplat.job import checks, privacy
from fedplat.rounds.protocols.base import find_training
from fedplat.simulation.clients import Fleet, build_fleet
from fedplat.simulation.clients.availability import Always
from fedplat.simulation.scenario.file import TABLE, SimulationFile

MAX_DRAWN = 100_000
"""The largest fleet that is drawn only to check a file."""


def check_feasible(spec: job.JobSpec, fleet: Fleet) -> str:
    """Raise `JobFileError` for a job whose first rounds need clients that the fleet does not have.

    Return a warning if each of its rounds waits for clients that do not exist; empty without one.
    """
    if spec.needs_approval:
        raise JobFileError(
            "approval: a simulation has no owners who could approve the job; leave the table out, or set "
            "approval.required = false"
        )
    protocol = find_training(spec)
    if not (needs := protocol.list_needs(spec)):
        return ""
    count = _count_eligible(spec, fleet)
    whose = f"the {fleet.num_clients:,} clients of the simulation"
    if spec.selection.where:
        whose = f"the {count:,} of {fleet.num_clients:,} clients of the simulation that satisfy selection.where"
    for key, needed in needs:
        if needed > count:
            raise JobFileError(f"{key}: expected at most {whose}")
    if spec.selection.min_separation and not protocol.carries_over:
        _check_separation(spec, fleet, count)
    target, selection = spec.selection.target, spec.selection
    if protocol.carries_over or selection.sampling.is_trial or selection.wait_for or target <= count:
        return ""
    return (
        f"selection.over_selection = {selection.over_selection:g}: a round asks for {target:,} clients, more than "
        f"{whose}, so it waits deadlines.selection_s = {spec.deadlines.selection_s:g} s for the others; set "
        "over_selection = 1.0"
    )


def check_sums(spec: job.JobSpec) -> None:
    """Raise `JobFileError` for a job whose model is a sum over examples, and which computes more than its mean.

    A learner states it by `sums = True`. Such a model has measurements, as running statistics are, and no weights:
    after a step of a server optimizer it has the sums of no data.
    """
    rule, reason = spec.aggregation, "the model is a sum over the examples of all clients"
    name, rate = plugins.name_of(rule), getattr(rule, "learning_rate", 1.0)
    is_mean = isinstance(rule, aggregate.FedAvg | aggregate.FedNova)
    if name in aggregate.RULES and not (is_mean and rate == 1.0):
        given = f"learning_rate = {rate:g}" if is_mean else f'rule = "{name}"'
        raise JobFileError(
            f'aggregation.{given}: {reason}, so a step is no model; expected the rule "fedavg" with learning_rate = 1'
        )
    if privacy.build_release(spec) is not None:
        raise JobFileError(f"privacy: {reason}, which noise would make useless; expected none, or another estimator")
    if problem := _describe_more_than_a_mean(spec):
        raise JobFileError(problem.format(reason=reason))
    for key in ("uplink", "downlink"):
        codec = getattr(spec.compression, key)
        if codec is not None and not isinstance(codec, codecs.Plain):
            raise JobFileError(
                f'compression.{key}: {reason}, which the codec "{plugins.name_of(codec)}" would round; expected '
                'none, or { codec = "none", zstd = true }'
            )


def _describe_more_than_a_mean(spec: job.JobSpec) -> str:
    """Return why versions of a job would not be the mean of its clients' models, or ""."""
    if spec.robust is not None:
        return "robust: {reason}, which only the mean gives; expected no [robust]"
    if spec.updates.clips:
        key = "clip_norm" if spec.updates.clip_norm else "adaptive_clip"
        return f"updates.{key}: {{reason}}, and a clipped update has the sums of no data; expected no clipping"
    if find_training(spec).carries_over:
        kind = plugins.name_of(spec.mode)
        return f'mode.kind = "{kind}": {{reason}}, and updates are relative to an older version; expected "sync"'
    return ""


def check_file(file: SimulationFile) -> str:
    """Check the job of a simulation file as `check` does, if the file alone gives the number of clients.

    Raises `JobFileError`.
    """
    options = file.simulation
    if getattr(options.model, "sums", False):
        check_sums(file.job)
    num_clients: int = getattr(options.partition, "clients", 0)
    if TABLE not in file.raw or not 0 < (num_clients or options.fleet.num_clients) <= MAX_DRAWN:
        return ""
    return check_feasible(file.job, build_fleet(options.fleet, options.seed, num_clients, file.folder))


def _count_eligible(spec: job.JobSpec, fleet: Fleet) -> int:
    """Return the number of clients whose labels satisfy `selection.where`; raise `JobFileError` if that is 0."""
    where = spec.selection.where
    accepts = label_expressions.compile_expression(where)
    _, examples, sizes = np.unique(fleet.kinds, return_index=True, return_counts=True)
    count = sum(
        int(size) for client, size in zip(examples, sizes, strict=True) if accepts(fleet.labels_of(int(client)))
    )
    if not count:
        labels = "; ".join(f"{name}: {', '.join(label.values[:8])}" for name, label in fleet.labels.items())
        raise JobFileError(
            f"selection.where = {toml.format_value(where)}: no client of the simulation satisfies it; expected "
            f"an expression over the labels of simulation.fleet, which are {labels or 'none'}"
        )
    return count


def _check_separation(spec: job.JobSpec, fleet: Fleet, count: int) -> None:
    """Raise `JobFileError` if so many clients rest after the first rounds that too few are left for the next.

    A round draws as many clients as it may if all are online, else perhaps only the minimum.
    """
    selection = spec.selection
    most = selection.target if isinstance(fleet.availability, Always) else selection.minimum
    free = count
    for round_number in range(1, min(spec.rounds, selection.min_separation + 1) + 1):
        if free < selection.minimum:
            raise JobFileError(
                f"selection.min_separation = {selection.min_separation}: in round {round_number}, {count - free:,} of "
                f"the {count:,} clients rest, and the {free:,} left are fewer than the {selection.minimum:,} that it "
                "needs; expected a smaller separation, a smaller goal or more clients"
            )
        free -= min(most, free)  # none of them may be drawn again within these rounds


def check_supported(spec: job.JobSpec) -> None:
    """Raise `JobFileError` for a job that trains on the server's data, that a Flower app runs, or with half a rule.

    `[pool]` is ignored: it changes no result.
    """
    if spec.flower is not None:
        raise JobFileError("flower: a Flower app is simulated from its folder; run fedplat flower run APP_DIR")
    checks.check_halves(spec)
    tables = {"warm_start": spec.warm_start, "server_step": spec.server_step}
    if unsupported := [f"[{name}]" for name, table in tables.items() if table is not None]:
        raise JobFileError(
            f"{' and '.join(unsupported)}: a simulation has no server to train on its own data; leave the table out, "
            "and begin with a model that was trained before (model.initial = a .safetensors file)"
        )
