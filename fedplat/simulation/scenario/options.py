"""The table `[simulation]` of a simulation file, and in it the learner that simulated clients train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from msgspec import Meta, Struct

from fedplat import errors, sklearn
from fedplat.config import plugin_objects, plugins, toml, user_code
from fedplat.config.user_code import Reference
from fedplat.learner import ArrayLearner, BaseLearner
from fedplat.metrics import Metric
from fedplat.simulation.clients import FleetOptions
from fedplat.simulation.clients.fleet import LinkOptions
from fedplat.simulation.data import DataSource, Partition
from fedplat.simulation.engines.registry import AutoOptions, EngineOptions

MAX_METRICS = 20
LOSS_NAMES = ("cross_entropy", "mse", "bce_with_logits")
"""The built-in losses, see `model.LOSSES`."""
ACCURACY_NAMES = ("auto", "classes", "none")
"""What `accuracy` can be besides a function, see `fedplat.pytorch.training.Learner`."""


@runtime_checkable
class LearnerOptions(Protocol):
    """The `[simulation.model]` table."""

    def build(self, folder: Path) -> Any:
        """Return the learner; its files are relative to `folder`. Raises `JobFileError` and `UserCodeError`."""
        ...


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="learner", tag="torch"):
    """A PyTorch module and its loss.

    `module` is a function that creates the PyTorch module; "" stands for the job's `model.initial`. `loss` is the name
    of a mean loss of outputs and targets, or a function. `personal` names the tensors that clients do not share. With
    `share` = "trained" the model has only what training changes; all other tensors are the base, equal on all clients.
    `metrics` are those of evaluations, besides the loss and the accuracy: names, or tables with the key `name`.
    `accuracy` is a function of outputs and targets that returns which answers are correct, or "classes" if the largest
    output of dimension 1 is the answer; "auto" is "classes" for the cross entropy, and no accuracy for other losses.
    """

    module: str = ""
    loss: str = "cross_entropy"
    personal: list[str] = []
    share: Literal["all", "trained"] = "all"
    metrics: Annotated[tuple[Metric, ...], Meta(max_length=MAX_METRICS)] = ()
    accuracy: str = "auto"

    def __post_init__(self) -> None:
        for key, value, names in (
            ("module", self.module, ("",)),
            ("loss", self.loss, LOSS_NAMES),
            ("accuracy", self.accuracy, ACCURACY_NAMES),
        ):
            try:
                if value not in names:
                    user_code.split(value)
            except errors.UserCodeError as exc:
                expected = ", ".join([*filter(None, names), "or module:function"]).removeprefix("or ")
                raise ValueError(f"{key} = {toml.format_value(value)}: expected {expected}") from exc

    def build(self, folder: Path) -> Any:
        """Return the learner."""
        from fedplat.simulation.scenario.model import make_learner

        learner = make_learner(self.module, self.loss, self.accuracy, folder)
        return dataclasses.replace(learner, personal=tuple(self.personal), share=self.share, metrics=self.metrics)


class LightningOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="learner", tag="lightning"):
    """A module of PyTorch Lightning: `module` is its class, or a function that creates it, with keyword `options`.

    With `share` = "trained" the model has only what training changes, see `ModelOptions`.
    """

    module: Reference
    options: dict[str, Any] = {}
    share: Literal["all", "trained"] = "all"

    def build(self, folder: Path) -> ArrayLearner:
        """Return the learner."""
        from fedplat.pytorch.lightning import LightningLearner, OwnLightningModule

        return LightningLearner(OwnLightningModule(self.module, folder, self.options), share=self.share)


class HuggingFaceOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="learner", tag="huggingface"):
    """A model of transformers, of which what is trained is shared: `module` is a function that creates it.

    `options` are keyword arguments of the function, `arguments` those of transformers' `TrainingArguments`, and
    `personal` names the tensors that clients do not share. `example` is a function that makes an example of a row of
    inputs and one of targets; by default they are the tokens and their labels.
    """

    module: Reference
    options: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    personal: list[str] = []
    example: Reference | None = None

    def build(self, folder: Path) -> ArrayLearner:
        """Return the learner."""
        from fedplat.pytorch.huggingface import HuggingFaceLearner, make_causal_example
        from fedplat.simulation.scenario.model import OwnFunction, OwnModule

        return HuggingFaceLearner(
            model=OwnModule(self.module, folder, self.options),
            arguments=self.arguments,
            personal=tuple(self.personal),
            example=make_causal_example if self.example is None else OwnFunction(self.example, folder),
        )


LEARNERS: Mapping[str, type[LearnerOptions]] = plugins.by_name(
    ModelOptions, sklearn.SklearnLearner, LightningOptions, HuggingFaceOptions
)
"""The options record of each built-in learner, by its name in a simulation file."""

plugins.define(
    plugins.Kind(
        "learners",
        "learner",
        "a learner",
        LearnerOptions,
        ("initial", "train", "evaluate"),
        LEARNERS,
        BaseLearner,
        default="torch",
    )
)


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
    `links` are the faults of links and silos in a decentralised job. `tables` is a function that returns the table of
    each site by its name, for a job with a procedure.
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
    tables: Reference | None = None

    def __post_init__(self) -> None:
        plugin_objects.adopt_fields(self, "simulation.")
        if self.target > 1.0 and self.target_metric == "accuracy":
            raise ValueError(f"target = {self.target:g}: expected at most 1, because an accuracy is a fraction")
