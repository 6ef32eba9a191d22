"""Mixing without training, for up to many thousand silos, and what decentralised jobs demand of a fleet.

Each silo begins with a random vector of `ENTRIES` numbers. The topologies and weights are those of the coordinator; a
round takes as long as its slowest silo needs to get the models of its neighbours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedplat import errors, job, texts
from fedplat.gossip import Gossip, distance_from_mean, draw_edges, metropolis, mix_all, push_all, push_sum
from fedplat.gossip.topology import describe_edges_problem, describe_unknown
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Always
from fedplat.simulation.clients.fleet import LinkOptions
from fedplat.simulation.recording import result
from fedplat.simulation.recording.statistics import Observer, measure_groups

ENTRIES = 16
"""The number of entries of a vector that stands for a model; the distance of silos does not depend on it."""
_START, _LOSS = 0x57A27, 0x10551
Edges = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Mixing:
    """A decentralised job without training, its fleet and the faults of its links; models have `model_bytes`.

    `observe` is called with each round.
    """

    spec: job.JobSpec
    fleet: Fleet
    links: LinkOptions
    seed: int
    until_s: float
    model_bytes: float
    observe: Observer | None = None


def mix_without_training(run: Mixing) -> result.Result:
    """Mix random vectors for the rounds of a job, and until the silos agree.

    Raises `JobFileError` for a job whose mixing depends on real models.
    """
    mode, spec, count, model_bytes = run.spec.gossip, run.spec, run.fleet.num_clients, run.model_bytes
    assert mode is not None
    if mode.exchange == "ring" or spec.compression.uplink is not None:
        name = "mode.exchange" if mode.exchange == "ring" else "compression.uplink"
        raise errors.JobFileError(
            f"{name}: without training there are no models to compute it with; simulate it with simulation.training = "
            "true"
        )
    values = np.random.default_rng(np.random.SeedSequence([run.seed, _START])).standard_normal((count, ENTRIES))
    weights = np.ones((count, 1))
    norm = math.sqrt(float(np.sum(values * values)) / count)
    merged, now, records, agree = np.zeros(count, np.int64), 0.0, list[result.AttemptResult](), False
    outages = sorted({each.silo for each in run.links.dead})
    for number in range(1, spec.rounds + mode.settle_rounds + 1):
        dead = {silo for silo in outages if run.links.is_dead(silo, number)}
        here = np.array([silo for silo in range(count) if silo not in dead], np.int64)
        edges = _draw_edges(mode, here, number)
        confirmed, links = _confirm(run, mode, number, edges)
        before = distance_from_mean(values / weights)
        if mode.is_directed:
            mixing = push_sum(count, confirmed)
            values, weights = push_all(mixing, values), push_all(mixing, weights)
        else:
            values = mix_all(metropolis(count, confirmed), values)
        merged[here] += 1
        sent = np.bincount(links[:, 0], minlength=count) * model_bytes
        received = np.bincount(links[:, 1], minlength=count) * model_bytes
        begun, now = now, now + _exchange_s(run, links, model_bytes)
        exchange = result.GossipExchange(
            silos=len(here),
            edges=len(edges),
            confirmed=len(confirmed),
            trains=False,
            distance=distance_from_mean(values / weights),
            reported=before / norm,
            busiest_bytes=float(np.max(sent + received)),
        )
        record = result.AttemptResult(
            round=number,
            attempt=1,
            kind="TRAIN",
            phase="COMMITTED",
            opened_at=begun,
            collecting_at=begun,
            ended_at=now,
            version=number,
            counts={"MERGED": len(here)},
            num_updates=len(here),
            total_weight=float(len(here)),
            bytes_down=float(received.sum()),
            bytes_up=float(sent.sum()),
            exchange=exchange,
        )
        records.append(record)
        if run.observe is not None:
            run.observe(record)
        agree = exchange.distance <= mode.tolerance * norm
        if now > run.until_s or (number >= spec.rounds and agree):
            break
    status, reason = "COMPLETED", ""
    if now > run.until_s:
        status, reason = "RUNNING", result.describe_end(run.until_s)
    elif not agree:
        rounds = texts.format_count(mode.settle_rounds, "round")
        status, reason = "FAILED", f"the silos do not agree after {rounds} without training"
    return _make_result(run, status, reason, records, merged)


def _make_result(
    run: Mixing, status: str, reason: str, records: Sequence[result.AttemptResult], merged: npt.NDArray[np.int64]
) -> result.Result:
    nothing = np.zeros_like(merged)
    participation = result.ParticipationCounts(assigned=merged, merged=merged, late=nothing, failed=nothing)
    totals = result.Totals(
        duration_s=records[-1].ended_at,
        rounds=len(records),
        attempts=len(records),
        abandoned=0,
        assigned=int(merged.sum()),
        counts={"MERGED": int(merged.sum())},
        lost=0,
        check_ins=0,
        refused=0,
        distinct_clients=int(np.count_nonzero(merged)),
        bytes_down=sum(record.bytes_down for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        events=0,
        batches=0,
    )
    return result.Result(
        job=run.spec.name,
        seed=run.seed,
        num_clients=run.fleet.num_clients,
        status=status,
        reason=reason,
        attempts=tuple(records),
        totals=totals,
        staleness={},
        groups=measure_groups(run.fleet, participation),
        participation=participation,
        problem="" if status == "COMPLETED" else reason,
    )


def _draw_edges(mode: Gossip, here: npt.NDArray[np.int64], number: int) -> Edges:
    """Return the edges of a round among the silos that are there, whose names are in order."""
    # The edges of a job file name silos as it has them; for all others the order of the silos is enough.
    name = name_silo if mode.topology == "edges" else "{:08}".format
    ordered = sorted(here.tolist(), key=name)
    drawn = draw_edges(mode, [name(silo) for silo in ordered], number)
    return np.array(ordered, np.int64)[drawn].reshape(-1, 2)


def _confirm(run: Mixing, mode: Gossip, number: int, edges: Edges) -> tuple[Edges, Edges]:
    """Return the edges whose messages arrive, and the links from sender to receiver over which one arrives."""
    seed = run.seed ^ _LOSS
    arrives = ~run.links.is_lost(seed, number, edges)
    if mode.is_directed:
        return edges[arrives], edges[arrives]
    back = edges[:, ::-1]
    returns = ~run.links.is_lost(seed, number, back)
    return edges[arrives & returns], np.concatenate([edges[arrives], back[returns]])


def _exchange_s(run: Mixing, links: Edges, model_bytes: float) -> float:
    """Return the seconds until the last silo has all models, which it gets one after the other."""
    if not len(links):
        return float(run.fleet.latency_s.max())
    fleet, (senders, receivers) = run.fleet, links.T
    fan_out = np.bincount(senders, minlength=fleet.num_clients)
    rates = np.minimum(fleet.download[receivers], fleet.upload[senders] / fan_out[senders])
    seconds = fleet.latency_s[receivers] + fleet.latency_s[senders] + model_bytes / rates
    return float(np.bincount(receivers, seconds).max())


def name_silo(silo: int) -> str:
    """Return the name of a silo in a simulation."""
    return str(silo)


def check_silos(spec: job.JobSpec, fleet: Fleet, links: LinkOptions) -> None:
    """Raise `JobFileError` for a fleet or links that a decentralised job cannot have."""
    goal, count = spec.selection.goal, fleet.num_clients
    if goal != count:
        raise errors.JobFileError(
            f"selection.goal = {goal}: the simulation has {count} silos, and all take part; expected {count}"
        )
    if not isinstance(fleet.availability, Always):
        raise errors.JobFileError(
            "simulation.fleet.availability: silos are always online but for simulation.links.dead, "
            'simulation.fleet.fails and vanishes; expected "always" with mode.kind = "gossip"'
        )
    _check_edges(spec, count)
    for each in links.dead:
        if each.silo >= count:
            raise errors.JobFileError(f"simulation.links.dead: there is no silo {each.silo}; expected 0 to {count - 1}")


def _check_edges(spec: job.JobSpec, count: int) -> None:
    mode = spec.gossip
    assert mode is not None
    if mode.topology != "edges":
        return
    if unknown := describe_unknown(mode, {name_silo(silo) for silo in range(count)}):
        raise errors.JobFileError(
            f'{unknown}; expected the indices of silos in a simulation, "0" to "{count - 1}", such as '
            '--set \'mode.edges=[["0", "1"]]\''
        )
    if problem := describe_edges_problem(mode, count):
        raise errors.JobFileError(problem)


def refuse_links(spec: job.JobSpec, fleet: Fleet, links: LinkOptions) -> None:
    """Raise `JobFileError` for faults of links between silos in a job that has none."""
    if links != LinkOptions():
        raise errors.JobFileError(
            'simulation.links: clients have no links to each other; leave the table out, or set mode.kind = "gossip"'
        )
