"""The checks of a job's tables against each other."""

from __future__ import annotations

from collections.abc import Iterator

from fedplat import aggregate, codecs, errors, modes, procedures, sampling
from fedplat.aggregate import drift
from fedplat.aggregate.drift import EASGD
from fedplat.config import user_code
from fedplat.config.plugins import build_checked, has_absent, name_of
from fedplat.job import combinations, part_checks, sections
from fedplat.job.combinations import CYCLIC, DISTILL, STALE_SYNCHRONOUS, find_contrary
from fedplat.job.part_checks import RULES_ON_MEAN
from fedplat.job.tables import JobTables, PoolOptions, ServerStep

NO_PRIVACY = (
    "privacy: the ServerApp reads the replies of single clients, so no guarantee would hold; expected no table "
    '[privacy] with a Flower app, or an ordinary job with [aggregation] rule = "fedavg"'
)
"""Why a job with a Flower app cannot be private."""


def check(spec: JobTables) -> None:
    """Raise `ValueError` with a line for each key that contradicts others.

    A stored job whose plugins are absent was checked when it was created.
    """
    if has_absent(spec):
        return
    mistakes: dict[str, str] = {}
    for line in _list_mistakes(spec):
        mistakes.setdefault(line.partition(":")[0], line)  # what is wrong with a key is told once
    if mistakes:
        raise ValueError("\n".join(mistakes.values()))
    combinations.check(spec)


def _list_mistakes(spec: JobTables) -> Iterator[str]:
    yield from _list_owner_mistakes(spec)
    yield from _list_rule_mistakes(spec, build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule"))
    _check_other_plugins(spec)
    if spec.secure_aggregation is not None:
        yield from part_checks.list_secure_mistakes(spec, spec.secure_aggregation)
    if spec.robust is not None:
        yield from _list_robust_mistakes(spec, spec.robust)
    if spec.buffered is not None:
        yield from _list_buffered_mistakes(spec)
    if isinstance(spec.mode, modes.Cyclic):
        yield from _list_cyclic_mistakes(spec)
    if spec.privacy is not None:
        yield from part_checks.list_privacy_mistakes(spec, spec.privacy)
    if spec.pool is not None and "durability" in find_contrary(spec, "pool"):
        yield 'pool: its ranks read the updates from the spool; expected durability = "spool"'
    if spec.server_step is not None:
        yield from _list_server_step_mistakes(spec, spec.server_step)
    if spec.pool is not None:
        yield from _list_pool_mistakes(spec, spec.pool)


def check_halves(spec: JobTables) -> None:
    """Raise `JobFileError` if clients of a new job run their half of an algorithm without the server's.

    Stored jobs are read without this check, and rules of plugins are not checked: their names may differ.
    """
    algorithm, rule = spec.config.get("algorithm"), name_of(spec.aggregation)
    if algorithm in (drift.FEDDYN, drift.SCAFFOLD) and rule != algorithm and rule in aggregate.RULES:
        raise errors.JobFileError(
            f'config.algorithm = "{algorithm}": this is the clients\' half of an algorithm, and the rule "{rule}" is '
            f'not the server\'s; expected [aggregation] rule = "{algorithm}" with num_clients, the size of the '
            'population, and [updates] weighting = "uniform"'
        )


def _list_owner_mistakes(spec: JobTables) -> Iterator[str]:
    """Yield the mistakes of a job in which silos or a Flower app do what a server does in others."""
    if spec.gossip is not None:
        yield from part_checks.list_gossip_mistakes(spec, spec.gossip)
    if spec.flower is not None:
        yield from _list_flower_mistakes(spec)
    if spec.procedure is not None:
        yield from _list_procedure_mistakes(spec, spec.procedure)
    elif spec.model == sections.Model():
        yield "model.initial: this key is required and missing"


def _list_rule_mistakes(spec: JobTables, rule: aggregate.Rule) -> Iterator[str]:
    name = name_of(spec.aggregation)
    if rule.keeps_memory and spec.pool is not None:
        yield f'aggregation.rule = "{name}": it works on whole models in one process; expected no [pool]'
    if rule.nonlinear:
        yield from part_checks.list_nonlinear_mistakes(spec)
    algorithm = rule.requirements.algorithm
    if spec.updates.weighting != "uniform" and (rule.unit_weights or algorithm):
        yield f'aggregation.rule = "{name}": it needs [updates] weighting = "uniform"'
    if isinstance(algorithm, str) and algorithm and spec.config.get("algorithm") != algorithm:
        yield (
            f'aggregation.rule = "{name}": clients must run their part of it; expected [config] algorithm = '
            f'"{algorithm}"'
        )
    if algorithm == EASGD:
        yield from part_checks.list_elastic_mistakes(spec)
    elif spec.config.get("algorithm") == EASGD:
        yield (
            f'config.algorithm = "{EASGD}": clients report what they exchange with the centre, and the rule "{name}" '
            f'would take it for their progress; expected [aggregation] rule = "{EASGD}"'
        )


def _check_other_plugins(spec: JobTables) -> None:
    for name in ("uplink", "downlink"):
        if (codec := getattr(spec.compression, name)) is not None:
            build_checked(codec, codecs.Codec, f"compression.{name}.codec")
    _ = spec.selection.uses_history  # a plugin that raises does so here, not in the coordinator


def _list_buffered_mistakes(spec: JobTables) -> Iterator[str]:
    if spec.selection.sampling.is_trial:
        name = name_of(spec.selection.sampling)
        yield f'selection.sampling.policy = "{name}": it draws whole cohorts; expected mode.kind = "sync"'
    if spec.selection.close != "goal":
        yield f'selection.close = "{spec.selection.close}": a buffer closes at its goal; expected mode.kind = "sync"'
    if spec.stale_synchronous is not None:
        yield from _list_clock_mistakes(spec, spec.stale_synchronous)


def _list_clock_mistakes(spec: JobTables, mode: modes.StaleSynchronous) -> Iterator[str]:
    """Yield a line for each option of a job with clocks that could keep a client from its next clock."""
    selection = spec.selection
    if selection.goal != 1:
        yield (
            f'selection.goal = {selection.goal}: with mode.kind = "ssp" each update makes a version when it arrives, '
            "because an update that waits for others would hold the clocks back; expected goal = 1"
        )
    if selection.wait_for > mode.concurrency:
        yield (
            f"selection.wait_for = {selection.wait_for}: expected at most mode.concurrency = {mode.concurrency}, the "
            "size of the clock set"
        )
    if selection.min_separation:
        yield (
            f"selection.min_separation = {selection.min_separation}: the others would wait for the slowest client "
            'while it rests; expected 0 with mode.kind = "ssp"'
        )
    if selection.sampling != sampling.Uniform():
        yield (
            f'selection.sampling.policy = "{name_of(selection.sampling)}": the clocks decide who trains next; expected '
            '"uniform" with mode.kind = "ssp"'
        )


def _list_cyclic_mistakes(spec: JobTables) -> Iterator[str]:
    """Yield a line for each option for whole cohorts of a job whose clients have turns."""
    selection = spec.selection
    if selection.goal != 1:
        yield (
            f'selection.goal = {selection.goal}: with mode.kind = "cyclic" a round is the turn of one client; expected '
            "goal = 1"
        )
    if selection.sampling != sampling.Uniform():
        yield (
            f'selection.sampling.policy = "{name_of(selection.sampling)}": each client has one turn in a cycle; '
            'expected "uniform" with mode.kind = "cyclic"'
        )
    if selection.min_separation:
        yield (
            f"selection.min_separation = {selection.min_separation}: the cycle decides when a client trains again; "
            'expected 0 with mode.kind = "cyclic"'
        )


def _list_flower_mistakes(spec: JobTables) -> Iterator[str]:
    """Yield a line for each table of a job with a Flower app for what the app itself decides."""
    if spec.privacy is not None:
        yield NO_PRIVACY
    for part in find_contrary(spec, "flower"):
        name = part.partition(".")[0]
        yield f"{name}: the Flower app decides about it; expected no such key with the table [flower]"
    selection = spec.selection
    if selection.sampling != sampling.Uniform() or selection.min_separation or selection.wait_for:
        yield (
            "selection: the Flower app draws the clients; expected none of sampling, min_separation and wait_for with "
            "the table [flower]"
        )


def _list_procedure_mistakes(spec: JobTables, procedure: procedures.Procedure) -> Iterator[str]:
    """Yield a line for each table of a job with a procedure for what the procedure decides, and for too many sites."""
    if spec.privacy is not None:
        yield "privacy: a procedure adds no noise to its sums; expected no table [privacy] with the table [procedure]"
    if spec.model != sections.Model():
        yield "model: the first message of the procedure is the initial model; expected no table [model]"
    if spec.config:
        yield "config: a procedure has its options in its own table; expected no table [config] with [procedure]"
    for part in find_contrary(spec, "procedure"):
        name = part.partition(".")[0]
        yield f"{name}: the procedure decides about it; expected no such key with the table [procedure]"
    selection, plain = spec.selection, sections.Selection(goal=1)
    if selection.sampling != sampling.Uniform() or selection.min_separation or selection.wait_for:
        yield (
            "selection: the sites of the first step answer all others, too; expected none of sampling, min_separation "
            "and wait_for with the table [procedure]"
        )
    for key in ("over_selection", "min_fraction"):
        if (value := getattr(selection, key)) not in (1.0, getattr(plain, key)):
            yield (
                f"selection.{key} = {value:g}: a step needs the replies of all goal = {selection.goal} sites; expected "
                "no such key with the table [procedure]"
            )
    try:
        with user_code.wrap_errors(f'procedure.kind = "{name_of(procedure)}"'):
            procedure.schema(procedure.begin().message).check_sites(selection.goal)
    except (errors.ProcedureError, errors.UserCodeError) as exc:
        yield f"procedure: {exc}"


def _list_server_step_mistakes(spec: JobTables, step: ServerStep) -> Iterator[str]:
    if spec.compression.downlink is not None:
        yield (
            "server_step: a version would not be the previous one plus the encoded step; expected no "
            "compression.downlink"
        )
    if step.method == "train":
        return
    if spec.parallel is not None:
        yield (
            'server_step.method = "distill": each rank computes the outputs of the clients\' whole models; expected '
            '"train", or no table [pool.parallel]'
        )
    for part in find_contrary(spec, DISTILL):
        name = 'durability = "memory"' if part == "durability" else part
        yield (
            f'server_step.method = "distill": it uses the model of each client of a round, which {name} '
            'excludes; expected "train"'
        )


def _list_pool_mistakes(spec: JobTables, pool: PoolOptions) -> Iterator[str]:
    if spec.warm_start is not None and spec.warm_start.method == "hogwild":
        if pool.parallel is not None:
            yield (
                'warm_start.method = "hogwild": each rank trains the whole model; expected "sgd", or no table '
                "[pool.parallel]"
            )
        if pool.backend == "nccl":
            yield (
                'warm_start.method = "hogwild": the ranks share the memory of the host, not that of GPUs; expected '
                'pool.backend = "gloo", or method = "sgd"'
            )
    if pool.parallel is not None:
        for name, table in (("warm_start", spec.warm_start), ("server_step", spec.server_step)):
            if table is not None:
                try:
                    pool.parallel.check_steps(
                        max_grad_norm=table.max_grad_norm, accumulate=table.accumulate, precision=table.precision
                    )
                except ValueError as exc:
                    yield f"{name}.{exc}"


def _list_robust_mistakes(spec: JobTables, robust: aggregate.Robust) -> Iterator[str]:
    if alone := {STALE_SYNCHRONOUS, CYCLIC}.intersection(find_contrary(spec, "robust")):
        yield (
            f"robust: it compares the updates of a version, and with {alone.pop()} a version has one; expected no "
            'table [robust], or mode.kind = "buffered"'
        )
    if not spec.aggregation.works_on_mean:
        yield (
            f"robust: expected aggregation.rule = {RULES_ON_MEAN}; {name_of(spec.aggregation)} has a mean of its own"
        )
    selection = spec.selection
    name, most = ("goal", selection.goal)
    if selection.close == "deadline":  # every assigned client may report
        name, most = ("over_selection x goal", selection.target)
    if most > aggregate.MAX_ROBUST_UPDATES:
        yield (
            f"selection.{name} = {most}: expected at most {aggregate.MAX_ROBUST_UPDATES} with [robust], which "
            "reads the updates of an attempt side by side"
        )
    try:
        robust.check(selection.minimum)
    except ValueError as exc:
        yield (
            f"robust: {exc}: this number may close an attempt, ceil(min_fraction x goal); raise selection.goal or "
            "selection.min_fraction, or lower robust.byzantine"
        )
