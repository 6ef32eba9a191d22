"""Running a decentralised job with silos that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedplat.errors import JobFileError
from fedplat.gossip.topology import describe_edges_problem, describe_unknown
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Always
from fedplat.simulation.clients.links import LinkOptions
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.gossip.driver import GossipDriver
from fedplat.simulation.gossip.silos import SiloModels
from fedplat.simulation.recording.result import AttemptResult, ParticipationCounts, Result, Totals
from fedplat.simulation.recording.statistics import Observer, measure_groups


def name_silo(silo: int) -> str:
    """Return the name of a silo in a simulation."""
    return str(silo)


@dataclasses.dataclass(frozen=True, eq=False)
class GossipRun:
    """A decentralised job, its fleet and the faults of its links; `observe` is called with each round."""

    spec: JobSpec
    fleet: Fleet
    links: LinkOptions
    seed: int
    until_s: float
    observe: Observer | None = None

    def check(self) -> None:
        """Raise `JobFileError` for a fleet that the job cannot have."""
        goal, count = self.spec.selection.goal, self.fleet.num_clients
        if goal != count:
            raise JobFileError(
                f"selection.goal = {goal}: the simulation has {count} silos, and all take part; expected {count}"
            )
        if not isinstance(self.fleet.availability, Always):
            raise JobFileError(
                "simulation.fleet.availability: silos are always online but for simulation.links.dead, "
                'simulation.fleet.fails and vanishes; expected "always" with mode.kind = "gossip"'
            )
        self._check_edges(count)
        for each in self.links.dead:
            if each.silo >= count:
                raise JobFileError(f"simulation.links.dead: there is no silo {each.silo}; expected 0 to {count - 1}")

    def _check_edges(self, count: int) -> None:
        mode = self.spec.gossip
        if mode is None or mode.topology != "edges":
            return
        if unknown := describe_unknown(mode, {name_silo(silo) for silo in range(count)}):
            raise JobFileError(
                f'{unknown}; expected the indices of silos in a simulation, "0" to "{count - 1}", such as '
                '--set \'mode.edges=[["0", "1"]]\''
            )
        if problem := describe_edges_problem(mode, count):
            raise JobFileError(problem)

    def make_result(  # noqa: PLR0913 - all that a run has found, each by its name
        self,
        *,
        status: str,
        reason: str,
        records: Sequence[AttemptResult],
        merged: npt.NDArray[np.int64],
        duration_s: float,
        events: int = 0,
        model: Parameters | None = None,
    ) -> Result:
        """Return the result of a run."""
        nothing = np.zeros_like(merged)
        participation = ParticipationCounts(assigned=merged, merged=merged, late=nothing, failed=nothing)
        totals = Totals(
            duration_s=duration_s,
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
            events=events,
            batches=events,
        )
        return Result(
            job=self.spec.name,
            seed=self.seed,
            num_clients=self.fleet.num_clients,
            status=status,
            reason=reason,
            attempts=tuple(records),
            totals=totals,
            staleness={},
            groups=measure_groups(self.fleet, participation),
            participation=participation,
            model=model,
            problem="" if status == "COMPLETED" else reason,
        )


def run_gossip(run: GossipRun, engine: Engine, initial: Parameters) -> Result:
    """Run a decentralised job whose silos an engine trains; the model of the result is the exported mean.

    Raises `JobFileError` for a fleet that the job cannot have, and what training raises.
    """
    fleet = run.fleet.with_examples([engine.num_examples(client) for client in range(engine.num_clients)])
    run = dataclasses.replace(run, fleet=fleet)
    run.check()
    models = SiloModels(run.spec, engine, initial, run.seed)
    driver = GossipDriver(run.spec, fleet, models, run.links, run.seed, run.observe)
    stopped = driver.run(run.until_s)
    outcome = driver.state.outcome
    return run.make_result(
        status="RUNNING" if outcome is None else outcome.status,
        reason=stopped if outcome is None else outcome.reason,
        records=driver.records,
        merged=driver.merged,
        duration_s=driver.now,
        events=driver.num_events,
        model=driver.exported,
    )
