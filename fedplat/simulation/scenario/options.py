"""The table `[simulation]` of a simulation file: what is simulated around a job."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.simulation.clients import FleetOptions
from fedplat.simulation.data import Partition, Source
from fedplat.user_code import Reference

YEAR_S = 365 * 86_400.0


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[simulation.model]`: what clients train.

    `module` is a function that makes the PyTorch module; "" is that of the job's `model.initial`. `loss` is the name of
    a mean loss of outputs and targets, or a function. `personal` are tensors that clients keep to themselves, by name.
    """

    module: Literal[""] | Reference = ""
    loss: Literal["cross_entropy", "mse", "bce_with_logits"] | Reference = "cross_entropy"
    personal: list[str] = []


class SimulationOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What is simulated: the data and who has it, the fleet, and how training is computed.

    `training` = false studies scheduling alone: no model is trained, and `model_bytes` is what clients download and
    send (0: what the job's model has). `until_s` ends the simulation after so much virtual time. `target` is the value
    of the metric `target_metric` on held-out data that the summary counts the rounds to (0: none). `held_out` is the
    part of its examples that each client keeps from training, to score models with in a federated evaluation.
    """

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    engine: Literal["auto", "loop", "processes", "ray", "vmap"] = "auto"
    workers: Annotated[int, Meta(ge=0, le=4096)] = 0
    training: bool = True
    model_bytes: Annotated[int, Meta(ge=0, le=10**15)] = 0
    until_s: Annotated[float, Meta(gt=0.0, le=1e12)] = YEAR_S
    held_out: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    target: float = 0.0
    target_metric: str = "accuracy"
    data: Source | None = None
    partition: Partition | None = None
    fleet: FleetOptions = FleetOptions()
    model: ModelOptions = ModelOptions()
