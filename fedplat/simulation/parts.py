"""The parts of a simulation, from which `run` makes its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat import job, model
from fedplat.procedures import ColumnFrame
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.fleet import LinkOptions
from fedplat.simulation.engines.interface import Engine
from fedplat.simulation.scenario.options import YEAR_S, SecureMode


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """A job, its fleet and its training; equal simulations have equal results, bit for bit.

    With an `engine` clients really train: the job begins with the model `initial`, extended by the entries that the
    job's rule stores in the model. The clients of the engine are those of the fleet, and its numbers of examples
    replace the fleet's. In a job with a procedure each client has a table of `tables`, in their order. Without either
    only the schedule is simulated, for a model of `model_bytes`. The run ends with the job, or after `until_s` virtual
    seconds. `secure_aggregation` and `links` are those of `SimulationOptions`.
    """

    spec: job.JobSpec
    fleet: Fleet
    engine: Engine | None = None
    initial: model.Parameters | None = None
    tables: Mapping[str, ColumnFrame] | None = None
    seed: int = 0
    model_bytes: float = 1e6
    until_s: float = YEAR_S
    secure_aggregation: SecureMode = "auto"
    links: LinkOptions = dataclasses.field(default_factory=LinkOptions)
