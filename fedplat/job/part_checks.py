"""The checks of decentralised, elastic, secure and private jobs: what their promise demands of all other parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedplat import aggregate, codecs, modes, privacy, sampling
from fedplat.aggregate import drift
from fedplat.aggregate.drift import EASGD
from fedplat.config.plugins import build_checked, name_of
from fedplat.flower.rule import FlowerAggregation
from fedplat.gossip.topology import MIN_RING, Gossip
from fedplat.job import combinations, sections, secure, tables
from fedplat.job.combinations import DOWNLINK, GOSSIP, OF_CLIENTS, explain
from fedplat.secure_aggregation.messages import MIN_GROUP, SecureAggregation
from fedplat.secure_aggregation.setup import MIN_CLIP

_NO_TABLES = {
    "privacy": "neighbours read a silo's model, and no server adds noise to a mean, so no guarantee would hold",
    "robust": "no one has the updates of all silos to compare them",
    "secure_aggregation": 'no server adds updates up; expected [mode] exchange = "ring", whose masks hide each model',
    "warm_start": "the server has no model to train; begin with a model that was trained before (model.initial)",
    "server_step": "the server has no model to train",
    "pool": "the server computes nothing with models",
    "flower": "the app's server would see the messages of all clients",
}
_NO_SCORES = "rounds commit no version to score; silos report the metrics of their training. Expected no such key with"
_NOTHING_KEPT = "the server keeps no model; expected no such key with"
GOSSIP_REASONS: Mapping[str, str] = {
    **{name: f"{why}; expected no table [{name}] with {GOSSIP}" for name, why in _NO_TABLES.items()},
    "durability": f"{_NOTHING_KEPT} {GOSSIP}",
    "retention": f"{_NOTHING_KEPT} {GOSSIP}",
    "evaluation.server": f"{_NO_SCORES} {GOSSIP}",
    OF_CLIENTS: f"{_NO_SCORES} {GOSSIP}",
    DOWNLINK: "no version is downloaded; expected compression.uplink for what silos send to their neighbours",
}
"""Why a decentralised job must not have these parts."""
_FIELDS = ("over_selection", "wait_for", "min_separation", "close")


def list_gossip_mistakes(spec: tables.JobTables, mode: Gossip) -> Iterator[str]:
    """Yield a line for each table or key that has no meaning without a server's model."""
    yield from explain(spec, GOSSIP, GOSSIP_REASONS)
    if spec.aggregation != aggregate.FedAvg():
        yield (
            f'aggregation.rule = "{name_of(spec.aggregation)}": silos mix models, and no rule combines updates; '
            'expected no table [aggregation] with mode.kind = "gossip"'
        )
    if (algorithm := spec.config.get("algorithm")) in (drift.FEDDYN, drift.SCAFFOLD):
        yield (
            f'config.algorithm = "{algorithm}": its other half is a rule of the server, which has no model; expected '
            'an algorithm of clients alone with mode.kind = "gossip", such as "sgd" or "fedprox"'
        )
    yield from _list_selection_mistakes(spec.selection, mode)
    yield from _list_updates_mistakes(spec.updates, mode)
    yield from _list_compression_mistakes(spec, mode)


def _list_selection_mistakes(selection: sections.Selection, mode: Gossip) -> Iterator[str]:
    default = sections.Selection(goal=selection.goal)
    changed = [name for name in _FIELDS if getattr(selection, name) != getattr(default, name)]
    if selection.sampling != sampling.Uniform():
        changed.append("sampling")
    if changed:
        yield (
            f"selection.{changed[0]}: all silos that announce a model take part, and none is drawn; expected only "
            'goal, the number of silos, min_fraction and where with mode.kind = "gossip"'
        )
    least = MIN_RING if mode.exchange == "ring" else 2
    if selection.minimum < least:
        yield (
            f"selection.goal = {selection.goal}: ceil(min_fraction x goal) is {selection.minimum}, and "
            + (
                "from the mean of two models each silo would know the other's"
                if mode.exchange == "ring"
                else "one silo has no neighbour"
            )
            + f"; expected at least {least}"
        )


def _list_updates_mistakes(updates: sections.Updates, mode: Gossip) -> Iterator[str]:
    if updates != sections.Updates(weighting=updates.weighting):
        yield (
            "updates: no one sees updates to clip, refuse or bound them; expected only weighting with "
            'mode.kind = "gossip"'
        )
    if mode.exchange != "ring" and updates.weighting != "uniform":
        yield (
            'updates.weighting = "examples": neighbours mix with weights that keep the plain mean; expected "uniform", '
            'or mode.exchange = "ring", whose mean may have weights'
        )


def _list_compression_mistakes(spec: tables.JobTables, mode: Gossip) -> Iterator[str]:
    uplink = spec.compression.uplink
    if uplink is None:
        if mode.gamma is not None:
            yield f"mode.gamma = {mode.gamma:g}: expected with compression.uplink only; without it, 1"
        return
    if mode.exchange == "ring":
        yield (
            "compression.uplink: a ring sends sums under masks, which no codec makes smaller; expected none with "
            'mode.exchange = "ring"'
        )
    if mode.exchange == "push-sum":
        yield (
            "compression.uplink: compressed gossip needs links with both directions; expected none with "
            'mode.exchange = "push-sum"'
        )
    if mode.gamma is None:
        yield (
            f'compression.uplink.codec = "{name_of(uplink)}": compressed gossip needs a step size; expected '
            'mode.gamma, such as 0.9 for "bf16" and "quantize" with 8 bits, and 0.1 for "topk" of a tenth'
        )


ELASTIC_REASONS: Mapping[str, str] = {
    "privacy": (
        "a client's difference from the centre is not clipped and comes from all its rounds, so the noise of one round "
        "does not cover it; expected no [privacy], or another rule"
    ),
    "secure_aggregation": (
        "the server decodes a mean of clipped updates, and a client would lose more than that; expected no "
        "[secure_aggregation], or another rule"
    ),
    "robust": (
        "such a rule leaves out or shortens some of the updates, which their clients have given away; expected no "
        "[robust], or another rule"
    ),
}
_GAINS_LESS = {combinations.DOWNLINK: "the centre would gain less than the clients lose; expected none"}


def list_elastic_mistakes(spec: tables.JobTables) -> Iterator[str]:
    """Yield one line with all mistakes if exchanges would not conserve x̃ + Σ x_i."""
    if mistakes := [*combinations.explain(spec, combinations.ELASTIC, ELASTIC_REASONS), *_change_mistakes(spec)]:
        yield f'aggregation.rule = "{EASGD}": ' + "; ".join(mistakes)


def _change_mistakes(spec: tables.JobTables) -> Iterator[str]:
    if spec.updates.clips:
        yield (
            "updates.clip_norm, updates.adaptive_clip: a client would lose more than the centre gains; expected none, "
            "or updates.max_norm, which refuses an update as a whole"
        )
    uplink = spec.compression.uplink
    if uplink is not None and not isinstance(uplink, codecs.Plain):
        yield (
            f'compression.uplink: with the codec "{name_of(uplink)}" the centre would not gain exactly what the client '
            'loses; expected none, or { codec = "none", zstd = true }'
        )
    yield from combinations.explain(spec, combinations.ELASTIC, _GAINS_LESS)
    if isinstance(spec.mode, modes.Buffered) and spec.mode.staleness != modes.ConstantStaleness():
        yield (
            f'mode.staleness = "{name_of(spec.mode.staleness)}": what stale clients have lost must count as a '
            'whole; expected "constant"'
        )


_LINEAR = "as a sum, of which no product of factors can be formed"
NONLINEAR_REASONS: Mapping[str, str] = {
    combinations.BUFFERED: "products of changes since different versions have no exact sum",
    combinations.STALE_SYNCHRONOUS: "products of changes since different versions have no exact sum",
    "secure_aggregation": f"the server gets the updates only {_LINEAR}",
    "privacy": f"the rule gets the updates only {_LINEAR}, with noise",
    "robust": "such a rule leaves one update, of which the products of the others are not known",
    combinations.UPLINK: "products of rounded factors are not those that the clients have trained",
    combinations.DOWNLINK: "a rounded step would lose what the rule corrects",
    "server_step": "the server would train beside what it keeps for the clients",
    combinations.DISTILL: "the server would train beside what it keeps for the clients",
    "warm_start": "the server would train beside what it keeps for the clients",
    "pool": "its ranks divide updates, and a product needs both factors",
}
"""Why a job whose rule multiplies the tensors of each update must not have these parts."""
_NONLINEAR_PARTS = frozenset(
    {combinations.SYNC, "updates", "retention", "evaluation.every", "evaluation.server", OF_CLIENTS}
    | {"aggregation", "durability"}
)


def list_nonlinear_mistakes(spec: tables.JobTables) -> Iterator[str]:
    """Yield one line with all parts that change an update, or hide it, before a rule can multiply its tensors."""
    mistakes = [
        f"{part}: {NONLINEAR_REASONS.get(part, 'it cannot be combined with this rule')}"
        for part in combinations.list_parts(spec)
        if part not in _NONLINEAR_PARTS
    ]
    if spec.updates.clips:
        mistakes.append("updates.clip_norm, updates.adaptive_clip: products of shortened factors are shortened twice")
    if mistakes:
        yield f'aggregation.rule = "{name_of(spec.aggregation)}": expected none of these: {"; ".join(mistakes)}'


RULES_ON_MEAN = ", ".join(name for name, each in aggregate.RULES.items() if each.works_on_mean)
"""The built-in rules that need only the mean of the updates."""
_SHARED_MASKS = 'expected "sync", since clients share masks for one attempt'
SECURE_REASONS: Mapping[str, str] = {
    combinations.BUFFERED: _SHARED_MASKS,
    combinations.STALE_SYNCHRONOUS: _SHARED_MASKS,
    "robust": "expected none, since such a rule compares the updates of single clients",
    combinations.UPLINK: "expected none, since masked updates cannot be compressed",
    combinations.OF_CLIENTS: "expected none, since these metrics would reach the server without masks",
    combinations.DISTILL: 'expected "train", since it uses the model of each client',
    "pool": "expected none, since masked updates are added by the server's own process",
}


def list_secure_mistakes(spec: tables.JobTables, options: SecureAggregation) -> Iterator[str]:
    """Yield one line with all mistakes if the server would need the updates of single clients."""
    if spec.procedure is not None:
        yield from _list_exact_mistakes(spec, options)
        return
    mistakes = [
        *_secure_updates_mistakes(spec),
        *_policy_mistakes(spec),
        *combinations.explain(spec, "secure_aggregation", SECURE_REASONS),
        *_group_mistakes(spec, options),
        *_privacy_mistakes(spec, options),
    ]
    if mistakes:
        yield "secure_aggregation: " + "; ".join(mistakes)


def _list_exact_mistakes(spec: tables.JobTables, options: SecureAggregation) -> Iterator[str]:
    """Yield one line with all mistakes of a job whose replies are integers, which need no quantizer."""
    default = SecureAggregation()
    mistakes = [
        f"{key}: replies to a procedure are added in 64 bits, with the bounds that it declares; expected no such key"
        for key in ("bits", "modulus", "metrics")
        if getattr(options, key) != getattr(default, key)
    ]
    mistakes += _small_group_mistakes(spec)
    if mistakes:
        yield "secure_aggregation: " + "; ".join(mistakes)


def _small_group_mistakes(spec: tables.JobTables) -> Iterator[str]:
    goal, groups = spec.selection.goal, secure.num_groups(spec)
    if goal // groups < MIN_GROUP:
        yield (
            f"selection.goal = {goal}: expected at least {MIN_GROUP} clients in each of {groups} groups, since from "
            "the sum of two updates each client would know the other's"
        )


def _secure_updates_mistakes(spec: tables.JobTables) -> Iterator[str]:
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
    yield from _small_group_mistakes(spec)
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


_CLOSES_EARLY = 'expected "sync", since a buffer closes at a number of reports'
PRIVACY_REASONS: Mapping[str, str] = {
    combinations.BUFFERED: _CLOSES_EARLY,
    combinations.STALE_SYNCHRONOUS: _CLOSES_EARLY,
    "robust": "expected none, since the influence of one client on the result of such a rule has no small bound",
    combinations.OF_CLIENTS: "expected none, since its results would be releases without noise",
}


def list_privacy_mistakes(spec: tables.JobTables, options: privacy.Privacy) -> Iterator[str]:
    """Yield one line with all mistakes if the job could not keep its privacy guarantee."""
    mistakes = [
        *_private_updates_mistakes(spec),
        *_other_mistakes(spec),
        *_participation_mistakes(spec, options),
        *_clip_mistakes(spec, options),
        *_trust_mistakes(spec, options),
    ]
    if mistakes:
        yield "privacy: " + "; ".join(mistakes)


def _private_updates_mistakes(spec: tables.JobTables) -> Iterator[str]:
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
    yield from combinations.explain(spec, "privacy", PRIVACY_REASONS)
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
