"""The checks of a decentralised job: tables for what a server does with models and updates have no meaning in it."""

from __future__ import annotations

from collections.abc import Mapping

from fedplat import aggregate, sampling
from fedplat.aggregate import feddyn, scaffold
from fedplat.config.plugins import name_of
from fedplat.gossip.options import MIN_RING, Gossip
from fedplat.job import sections, tables
from fedplat.job.combinations import DOWNLINK, GOSSIP, OF_CLIENTS, explain

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
REASONS: Mapping[str, str] = {
    **{name: f"{why}; expected no table [{name}] with {GOSSIP}" for name, why in _NO_TABLES.items()},
    "durability": f"{_NOTHING_KEPT} {GOSSIP}",
    "retention": f"{_NOTHING_KEPT} {GOSSIP}",
    "evaluation.server": f"{_NO_SCORES} {GOSSIP}",
    OF_CLIENTS: f"{_NO_SCORES} {GOSSIP}",
    DOWNLINK: "no version is downloaded; expected compression.uplink for what silos send to their neighbours",
}
"""Why a decentralised job must not have these parts."""
_FIELDS = ("over_selection", "wait_for", "min_separation", "close")


def check_gossip(spec: tables.JobTables, mode: Gossip) -> None:
    """Raise `ValueError` if a job has a table or key that has no meaning without a server's model."""
    for mistake in explain(spec, GOSSIP, REASONS):
        raise ValueError(mistake)
    if spec.aggregation != aggregate.FedAvg():
        raise ValueError(
            f'aggregation.rule = "{name_of(spec.aggregation)}": silos mix models, and no rule combines updates; '
            'expected no table [aggregation] with mode.kind = "gossip"'
        )
    if (algorithm := spec.config.get("algorithm")) in (feddyn.NAME, scaffold.NAME):
        raise ValueError(
            f'config.algorithm = "{algorithm}": its other half is a rule of the server, which has no model; expected '
            'an algorithm of clients alone with mode.kind = "gossip", such as "sgd" or "fedprox"'
        )
    _check_selection(spec.selection, mode)
    _check_updates(spec.updates, mode)
    _check_compression(spec, mode)


def _check_selection(selection: sections.Selection, mode: Gossip) -> None:
    default = sections.Selection(goal=selection.goal)
    changed = [name for name in _FIELDS if getattr(selection, name) != getattr(default, name)]
    if selection.sampling != sampling.Uniform():
        changed.append("sampling")
    if changed:
        raise ValueError(
            f"selection.{changed[0]}: all silos that announce a model take part, and none is drawn; expected only "
            'goal, the number of silos, min_fraction and where with mode.kind = "gossip"'
        )
    least = MIN_RING if mode.exchange == "ring" else 2
    if selection.minimum < least:
        raise ValueError(
            f"selection.goal = {selection.goal}: ceil(min_fraction x goal) is {selection.minimum}, and "
            + (
                "from the mean of two models each silo would know the other's"
                if mode.exchange == "ring"
                else "one silo has no neighbour"
            )
            + f"; expected at least {least}"
        )


def _check_updates(updates: sections.Updates, mode: Gossip) -> None:
    if updates != sections.Updates(weighting=updates.weighting):
        raise ValueError(
            "updates: no one sees updates to clip, refuse or bound them; expected only weighting with "
            'mode.kind = "gossip"'
        )
    if mode.exchange != "ring" and updates.weighting != "uniform":
        raise ValueError(
            'updates.weighting = "examples": neighbours mix with weights that keep the plain mean; expected "uniform", '
            'or mode.exchange = "ring", whose mean may have weights'
        )


def _check_compression(spec: tables.JobTables, mode: Gossip) -> None:
    uplink = spec.compression.uplink
    if uplink is None:
        if mode.gamma is not None:
            raise ValueError(f"mode.gamma = {mode.gamma:g}: expected with compression.uplink only; without it, 1")
        return
    if mode.exchange == "ring":
        raise ValueError(
            "compression.uplink: a ring sends sums under masks, which no codec makes smaller; expected none with "
            'mode.exchange = "ring"'
        )
    if mode.exchange == "push-sum":
        raise ValueError(
            "compression.uplink: compressed gossip needs links with both directions; expected none with "
            'mode.exchange = "push-sum"'
        )
    if mode.gamma is None:
        raise ValueError(
            f'compression.uplink.codec = "{name_of(uplink)}": compressed gossip needs a step size; expected '
            'mode.gamma, such as 0.9 for "bf16" and "quantize" with 8 bits, and 0.1 for "topk" of a tenth'
        )
