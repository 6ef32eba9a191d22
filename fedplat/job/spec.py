"""A training job as a whole: its tables, and the checks between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from fedplat import aggregate, codecs, modes, privacy
from fedplat.errors import JobFileError
from fedplat.job.pool import PoolOptions, ServerStep, WarmStart
from fedplat.job.sections import (
    Compression,
    Count,
    Deadlines,
    Evaluation,
    Flower,
    Model,
    Name,
    Retention,
    Retry,
    Scalar,
    Selection,
    Updates,
)
from fedplat.plugin_objects import adopt_fields
from fedplat.plugins import BUILTIN, Plugins, build_checked, has_absent, name_of
from fedplat.sampling import Poisson, Uniform
from fedplat.toml import (
    format_value,
    normalize,
    read_name,
    read_record,
    read_toml,
    shown_key,
    to_table,
)
from fedplat.toml_text import write_toml

OUTLIER_FACTOR = 1000.0
MAX_WEIGHT_FACTOR = 10.0
NO_PRIVACY = (
    "privacy: the ServerApp reads the replies of single clients, so no guarantee would hold; expected no table "
    '[privacy] with a Flower app, or an ordinary job with [aggregation] rule = "fedavg"'
)
"""Why a job with a Flower app cannot be private."""
_RULES_ON_MEAN = ", ".join(name for name, each in aggregate.RULES.items() if each.works_on_mean)


class JobSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A training job."""

    name: Name
    """Name of the job: letters, digits and `_.-`."""
    population: Name
    """Population whose clients may take part."""
    trainer: Name
    """Name under which the training function is installed on the clients."""
    rounds: Count
    """Number of committed rounds after which the job is complete."""
    model: Model
    """Source of the initial model."""
    selection: Selection
    """Clients that take part, and when an attempt closes."""
    mode: modes.Sync | modes.Buffered = modes.Sync()
    """Synchronous rounds, or asynchronous training with a buffer of updates."""
    config: dict[str, Scalar] = {}
    """Hyper-parameters that the trainer finds in `task.config`."""
    durability: Literal["spool", "memory"] = "spool"
    """`"spool"`: accepted updates are stored on the server's disk until their version is committed, so a killed server
    continues the open attempt. `"memory"`: updates are never written to disk (Linux), and a crash costs the open
    attempt, which is retried, but never the job."""
    deadlines: Deadlines = Deadlines()
    """Duration of each phase."""
    retry: Retry = Retry()
    """Back-off between attempts at the same round."""
    updates: Updates = Updates()
    """Weights and bounds of updates."""
    compression: Compression = Compression()
    """Codecs of updates and versions."""
    aggregation: aggregate.RuleOptions = aggregate.FedAvg()
    """Aggregation rule and its options."""
    robust: aggregate.Robust | None = None
    """Robust aggregation in place of the mean; none: the rule's own mean."""
    privacy: privacy.Privacy | None = None
    """Differential privacy of clients; none: no guarantee."""
    evaluation: Evaluation = Evaluation()
    """Evaluation of committed models."""
    retention: Retention = Retention()
    """Files and history that the server keeps."""
    pool: PoolOptions | None = None
    """Ranks of the server that work for the job, if it has any; needs `durability = "spool"`."""
    warm_start: WarmStart | None = None
    """Training on the server's data before round 1; none: round 1 begins with the initial model."""
    server_step: ServerStep | None = None
    """Training on the server's data at the end of rounds; none: only clients train."""
    flower: Flower | None = None
    """Flower app whose messages the rounds exchange; none: clients train the job's model."""

    def __post_init__(self) -> None:
        adopt_fields(self)
        _check_values(self.config, "config")
        if self.flower is not None:
            _check_values(self.flower.run_config, "flower.run_config")
        _check(self)

    @property
    def client_config(self) -> Mapping[str, Scalar]:
        """The values that clients find in `task.config`."""
        return self.config if self.flower is None else self.flower.run_config

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the server's own training is divided into."""
        return self.pool.ranks if self.pool is not None else 1

    @property
    def buffered(self) -> modes.Buffered | None:
        """The buffer options of an asynchronous job; None if it has synchronous rounds."""
        return self.mode if isinstance(self.mode, modes.Buffered) else None

    @property
    def max_participations(self) -> int:
        """The number of rounds in which a client may take part; 0: no limit."""
        return self.privacy.max_participations if self.privacy is not None else 0

    @property
    def remembers(self) -> bool:
        """True if selection depends on participation in earlier rounds."""
        return self.selection.remembers or self.max_participations > 0

    @property
    def num_wanted(self) -> int:
        """The number of clients that the job needs at work at the same time."""
        return self.mode.concurrency if isinstance(self.mode, modes.Buffered) else self.selection.target

    @property
    def outlier_factor(self) -> float:
        """The maximum norm of an update, relative to the median; 0: no limit.

        By default 1000, and 0 if clipping or a robust rule bounds the influence of an update.
        """
        if self.updates.outlier_factor is not None:
            return self.updates.outlier_factor
        if self.flower is not None:
            return 0.0
        return 0.0 if self.updates.clips or self.robust is not None else OUTLIER_FACTOR

    @property
    def max_weight_factor(self) -> float:
        """The maximum number of examples that an update counts for, relative to the median; 0: no limit.

        By default 10 with `weighting = "examples"`. A private job has its own bound: no update has a weight above 1.
        """
        if self.updates.weighting == "uniform" or self.privacy is not None or self.flower is not None:
            return 0.0
        factor = self.updates.max_weight_factor
        return MAX_WEIGHT_FACTOR if factor is None else factor

    def weight(self, num_examples: float, staleness: int = 0, most: float = math.inf) -> float:
        """Return the weight of an update that was trained on `num_examples` and is `staleness` versions behind.

        It counts for at most `most` examples.
        """
        most = min(most, self.updates.max_examples)
        weight = 1.0 if self.updates.weighting == "uniform" else min(num_examples, most)
        if self.privacy is not None and self.updates.weighting == "examples":
            weight /= self.updates.max_examples  # at most 1
        return self.mode.weight(staleness) * weight


def parse_job(text: str, plugins: Plugins = BUILTIN) -> JobSpec:
    """Parse a job file, which may use the names of `plugins`. Raises `JobFileError`, with one line per mistake."""
    spec = read_record(read_toml(text), JobSpec, plugins=plugins)
    check_algorithm(spec, plugins)
    return spec


def check_algorithm(spec: JobSpec, plugins: Plugins = BUILTIN) -> None:
    """Raise `JobFileError` unless `config.algorithm` names the algorithm whose class the job's rule requires.

    The class decides, not the name: the class that `plugins` find for the name in `[config]` has to be the required one
    or a subclass of it. So both halves may be named by path, by entry point or by a name that their owner gave them. A
    rule that requires a name is checked with the job's other tables.
    """
    if has_absent(spec) or plugins.absent:
        return  # the server, which has the plugins, checks it
    required = build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule").requirements.algorithm
    if isinstance(required, str):
        return
    key = "config.algorithm"
    given = read_name(spec.config.get("algorithm", "sgd"), aggregate.LOCAL_ALGORITHM, key, plugins)
    if not issubclass(given, required):
        raise JobFileError(
            f'aggregation.rule = "{name_of(spec.aggregation)}": clients must run their part of it; expected [config] '
            f"algorithm = a name of the class {required.__name__} ({required.__module__}), and "
            f'"{given.__struct_config__.tag}" is another'
        )


def job_file(spec: JobSpec) -> str:
    """Return the text of the job file of a job that was made from objects.

    Raises `JobFileError` with one line for each mistake, and for a plugin, because servers have only the built-in
    names.
    """
    text = write_toml(to_table(normalize(spec)))
    check_main(parse_job(text).model.initial)
    return text


def check_main(initial: str) -> None:
    """Raise `JobFileError` if `model.initial` names a function that only the running program has."""
    if initial.startswith("__main__:"):
        raise JobFileError(
            f'model.initial = "{initial}": the function is defined in a notebook or script; expected a function of a '
            "module, module:function, or a .safetensors file"
        )


def _check(spec: JobSpec) -> None:
    """Raise `ValueError` if the tables of a job contradict each other.

    A stored job whose plugins are absent was checked when it was created.
    """
    if has_absent(spec):
        return
    if spec.flower is not None:
        _check_flower(spec)
    _check_rule(spec, build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule"))
    for name in ("uplink", "downlink"):
        if (codec := getattr(spec.compression, name)) is not None:
            build_checked(codec, codecs.Codec, f"compression.{name}.codec")
    _ = spec.selection.uses_history  # a plugin that raises does so here, not in the coordinator
    if spec.robust is not None:
        _check_robust(spec, spec.robust)
    if spec.buffered is not None:
        _check_buffered(spec)
    if spec.privacy is not None:
        _check_privacy(spec, spec.privacy)
    if spec.pool is not None and spec.durability == "memory":
        raise ValueError('pool: its ranks read the updates from the spool; expected durability = "spool"')
    if spec.server_step is not None:
        _check_server_step(spec, spec.server_step)


def _check_values(values: Mapping[str, Scalar], table: str) -> None:
    """Raise `ValueError` for values that cannot be sent to clients."""
    if len(values) > 1000:
        raise ValueError(f"{table} has {len(values)} keys; expected at most 1000")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{table}.{shown_key(key)} = {value}: expected a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{table}.{shown_key(key)} = {format_value(value)}: expected a number of at most 64 bits")


def _check_rule(spec: JobSpec, rule: aggregate.Rule) -> None:
    name = name_of(spec.aggregation)
    if rule.keeps_memory and spec.pool is not None:
        raise ValueError(f'aggregation.rule = "{name}": it works on whole models in one process; expected no [pool]')
    algorithm = rule.requirements.algorithm
    if spec.updates.weighting != "uniform" and (rule.unit_weights or algorithm):
        raise ValueError(f'aggregation.rule = "{name}": it needs [updates] weighting = "uniform"')
    if isinstance(algorithm, str) and algorithm and spec.config.get("algorithm") != algorithm:
        raise ValueError(
            f'aggregation.rule = "{name}": clients must run their part of it; expected [config] algorithm = '
            f'"{algorithm}"'
        )


def _check_buffered(spec: JobSpec) -> None:
    if spec.selection.sampling.is_trial:
        name = name_of(spec.selection.sampling)
        raise ValueError(f'selection.sampling.policy = "{name}": it draws whole cohorts; expected mode.kind = "sync"')
    if spec.selection.close != "goal":
        raise ValueError(
            f'selection.close = "{spec.selection.close}": a buffer closes at its goal; expected mode.kind = "sync"'
        )


def _check_flower(spec: JobSpec) -> None:
    """Raise `ValueError` if a job with a Flower app has a table for what the app itself decides."""
    defaults: dict[str, object] = {
        "privacy": None,
        "robust": None,
        "warm_start": None,
        "server_step": None,
        "pool": None,
        "mode": modes.Sync(),
        "durability": "spool",
        "updates": Updates(),
        "compression": Compression(),
        "aggregation": aggregate.FedAvg(),
        "evaluation": Evaluation(),
    }
    if spec.privacy is not None:
        raise ValueError(NO_PRIVACY)
    for name, default in defaults.items():
        if getattr(spec, name) != default:
            raise ValueError(f"{name}: the Flower app decides about it; expected no such key with the table [flower]")
    selection = spec.selection
    if selection.sampling != Uniform() or selection.min_separation or selection.wait_for:
        raise ValueError(
            "selection: the Flower app draws the clients; expected none of sampling, min_separation and wait_for with "
            "the table [flower]"
        )


def _check_server_step(spec: JobSpec, step: ServerStep) -> None:
    if spec.compression.downlink is not None:
        raise ValueError(
            "server_step: a version would not be the previous one plus the encoded step; expected no "
            "compression.downlink"
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
            f'server_step.method = "distill": it uses the model of each client of a round, which {found[0]} '
            'excludes; expected "train"'
        )


def _check_robust(spec: JobSpec, robust: aggregate.Robust) -> None:
    if not spec.aggregation.works_on_mean:
        raise ValueError(
            f"robust: expected aggregation.rule = {_RULES_ON_MEAN}; {name_of(spec.aggregation)} has a mean of its own"
        )
    selection = spec.selection
    name, most = ("goal", selection.goal)
    if selection.close == "deadline":  # every assigned client may report
        name, most = ("over_selection x goal", selection.target)
    if most > aggregate.MAX_ROBUST_UPDATES:
        raise ValueError(
            f"selection.{name} = {most}: expected at most {aggregate.MAX_ROBUST_UPDATES} with [robust], which "
            "reads the updates of an attempt side by side"
        )
    try:
        robust.check(selection.minimum)
    except ValueError as exc:
        raise ValueError(
            f"robust: {exc}: this number may close an attempt, ceil(min_fraction x goal); raise selection.goal or "
            "selection.min_fraction, or lower robust.byzantine"
        ) from exc


def _check_privacy(spec: JobSpec, options: privacy.Privacy) -> None:
    """Raise `ValueError`, with all mistakes in one message, if the job could not keep its privacy guarantee."""
    mistakes = [
        *_updates_mistakes(spec),
        *_other_mistakes(spec),
        *_participation_mistakes(spec, options),
        *_clip_mistakes(spec, options),
    ]
    if mistakes:
        raise ValueError("privacy: " + "; ".join(mistakes))


def _updates_mistakes(spec: JobSpec) -> Iterator[str]:
    updates = spec.updates
    if not (updates.clip_norm or updates.adaptive_clip):
        yield "the influence of one client needs a bound; expected updates.clip_norm or updates.adaptive_clip"
    if updates.weighting == "examples" and updates.max_examples >= Updates().max_examples:
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


def _other_mistakes(spec: JobSpec) -> Iterator[str]:
    if isinstance(spec.aggregation, aggregate.FlowerAggregation):
        yield (
            f'aggregation.rule = "flower": expected {_RULES_ON_MEAN}; a Flower strategy sees the model of each client, '
            "before any noise, and keeps what it likes of it"
        )
    elif not spec.aggregation.works_on_mean:
        yield (
            f'aggregation.rule = "{name_of(spec.aggregation)}": expected {_RULES_ON_MEAN}; others have a mean of '
            "their own"
        )
    if spec.robust is not None:
        yield "robust: expected none, since the influence of one client on the result of such a rule has no small bound"
    if spec.buffered is not None:
        yield 'mode.kind = "buffered": expected "sync", since a buffer closes at a number of reports'
    if spec.evaluation.clients is not None:
        yield "evaluation.clients: expected none, since its results would be releases without noise"
    if (codec := spec.compression.uplink) is not None and type(codec) not in codecs.CODECS.values():
        # Clipping reads an update twice, and its bound holds for each update alone.
        yield (
            f'compression.uplink.codec = "{name_of(codec)}": expected {", ".join(codecs.CODECS)}, since the bound on a '
            "client's influence depends on how its update is decoded"
        )
    if spec.deadlines.adaptive is not None:
        yield "deadlines.adaptive: expected none, since it reveals to clients how long others took"


def _participation_mistakes(spec: JobSpec, options: privacy.Privacy) -> Iterator[str]:
    selection, kind = spec.selection, options.participation
    if selection.close != "deadline":
        yield 'selection.close = "goal": expected "deadline", since the fastest would certainly be in the model'
    expected, policy = Poisson if kind == "poisson" else Uniform, selection.sampling
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


def _clip_mistakes(spec: JobSpec, options: privacy.Privacy) -> Iterator[str]:
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
