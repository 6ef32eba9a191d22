"""The models of silos, as the driver uses them: no update reaches a server, so there is nothing to report or to add."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from fedplat.model import Parameters
from fedplat.rounds import AttemptKey
from fedplat.simulation.clients.device import DeviceAssignment
from fedplat.simulation.clients.links import LinkOptions
from fedplat.simulation.federated.interface import NoTraining, Report
from fedplat.simulation.gossip.silos import SiloModels


class SiloTraining(NoTraining):
    """The silos of a decentralised job, which train and mix `models` and exchange them over `links`.

    `model` is the mean that the silos have exported, and `scores` the evaluation of the round that ends.
    """

    one_at_a_time = True

    def __init__(self, models: SiloModels, links: LinkOptions) -> None:
        super().__init__(models.model_bytes)
        self.models, self.links = models, links
        self.model: Parameters | None = None
        self.scores: Mapping[str, float] = {}

    @override
    def report(self, task: DeviceAssignment) -> Report:
        raise AssertionError(task)

    @override
    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        scores, self.scores = self.scores, {}
        return scores
