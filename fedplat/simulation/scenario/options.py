"""The table `[simulation]` of a simulation file: the environment of the job."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.config.plugin_objects import adopt_fields
from fedplat.simulation.clients import FleetOptions
from fedplat.simulation.clients.links import LinkOptions
from fedplat.simulation.data import DataSource, Partition
from fedplat.simulation.engines.registry import AutoOptions, EngineOptions
from fedplat.simulation.scenario.learners import LearnerOptions, ModelOptions

SecureMode = Literal["auto", "real", "model"]
YEAR_S = 365 * 86_400.0


class SimulationOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[simulation]`: the data and its partition, the fleet, and the engine.

    With `training` = false only the scheduling is simulated: no model is trained, and `model_bytes` is the size of
    downloads and uploads (0: the size of the job's model). The simulation ends after `until_s` virtual seconds at the
    latest. The summary counts the rounds until `target_metric` on held-out data reaches `target` (0: no target).
    `held_out` is the part of its examples that each client keeps from training, to score models in a federated
    evaluation. `secure_aggregation` is how that of the job is simulated: `"real"` with its cryptography, `"model"`
    without keys, shares and masks, which changes no result, and `"auto"` with it for cohorts of up to 1,000 clients.
    `links` are the faults of links and silos in a decentralised job.
    """

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    engine: EngineOptions = AutoOptions()
    workers: Annotated[int, Meta(ge=0, le=4096)] = 0
    training: bool = True
    model_bytes: Annotated[int, Meta(ge=0, le=10**15)] = 0
    until_s: Annotated[float, Meta(gt=0.0, le=1e12)] = YEAR_S
    held_out: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    secure_aggregation: SecureMode = "auto"
    target: float = 0.0
    target_metric: str = "accuracy"
    data: DataSource | None = None
    partition: Partition | None = None
    fleet: FleetOptions = FleetOptions()
    links: LinkOptions = LinkOptions()
    model: LearnerOptions = ModelOptions()

    def __post_init__(self) -> None:
        adopt_fields(self, "simulation.")
