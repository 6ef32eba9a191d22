"""The call that runs a simulation."""

from __future__ import annotations

import dataclasses

from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.simulation.driver import Driver, Trace
from fedplat.simulation.fleet import Fleet
from fedplat.simulation.learning import Learning
from fedplat.simulation.ports import Engine
from fedplat.simulation.result import Result
from fedplat.simulation.tally import Observer, Tally, groups_of, staleness_of
from fedplat.simulation.training import Scheduling

YEAR_S = 365 * 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """A job, its fleet, and how it is trained; equal simulations give equal results, bit for bit.

    With an `engine` the job begins with the model `initial` and clients really train; the engine's clients are those of
    the fleet, and its numbers of examples replace the fleet's. Without one only the schedule is simulated, for a model
    of `model_bytes`. The run ends with the job, or after `until_s` virtual seconds.
    """

    spec: JobSpec
    fleet: Fleet
    engine: Engine | None = None
    initial: Parameters | None = None
    seed: int = 0
    model_bytes: float = 1e6
    until_s: float = YEAR_S


def run(simulation: Simulation, observe: Observer | None = None, trace: Trace | None = None) -> Result:
    """Runs a simulation to its end; `observe` hears of each attempt when it has ended, `trace` of each batch of events.

    Raises `ValueError` when its parts do not fit together, and whatever training raises.
    """
    spec, fleet, seed, engine = simulation.spec, simulation.fleet, simulation.seed, simulation.engine
    if engine is None:
        size = simulation.model_bytes if simulation.initial is None else simulation.initial.schema.file_size_bytes
        training = Scheduling(float(size))
    else:
        if simulation.initial is None:
            raise ValueError("a simulation with an engine needs an initial model")
        fleet = fleet.with_examples([engine.num_examples(client) for client in range(engine.num_clients)])
        training = Learning(spec, engine, simulation.initial, seed)
    tally = Tally(fleet, observe)
    driver = Driver(spec, fleet, training, tally, seed, trace)
    driver.run(simulation.until_s)
    participation = tally.participation()
    return Result(
        job=spec.name,
        seed=seed,
        num_clients=fleet.num_clients,
        status=driver.job.status.value,
        reason=driver.job.reason,
        attempts=tuple(tally.attempts),
        totals=tally.totals(driver.now),
        staleness=staleness_of(tally.attempts),
        groups=groups_of(fleet, participation),
        participation=participation,
        model=training.model if isinstance(training, Learning) else None,
    )
