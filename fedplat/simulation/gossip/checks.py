"""What decentralised jobs demand of a fleet, and what all other jobs must not have."""

from __future__ import annotations

from fedplat import errors, job
from fedplat.gossip.topology import describe_edges_problem, describe_unknown
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Always
from fedplat.simulation.clients.links import LinkOptions


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
