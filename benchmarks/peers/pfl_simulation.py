"""Run the workload in pfl-research, in one process.

python pfl_simulation.py MODEL CLIENTS COHORT SAMPLES ROUNDS
"""

import sys

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from simulated_work import BATCH_SIZE, LEARNING_RATE, MODELS, data, print_event
from torch import nn


class Module(nn.Module):
    """A model with the interface of pfl. Labels arrive as float32 numbers, which the cross entropy does not accept."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def loss(self, inputs, targets, eval=False):
        """Return the mean loss of a batch."""
        self.train(not eval)
        return nn.functional.cross_entropy(self.inner(inputs), targets.long())

    @torch.no_grad()
    def metrics(self, inputs, targets, eval=True):
        """Return no metrics, because nothing is evaluated."""
        return {}


class Tell(TrainingProcessCallback):
    """A callback that prints the time of each round."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Print the time of the end of a round."""
        print_event("round")
        return False, Metrics()


def main(model, clients, cohort, samples, rounds):
    """Run federated averaging for the given number of rounds."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    print_event("start")
    inputs, targets = data(model, clients, samples)
    slices = {
        client: (inputs[client * samples : (client + 1) * samples], targets[client * samples : (client + 1) * samples])
        for client in range(clients)
    }
    dataset = FederatedDataset.from_slices(slices, get_user_sampler("random", list(range(clients))))
    module = Module(MODELS[model]())
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, 1_000_000_000, cohort, None),
        backend=SimulatedBackend(dataset, None, [WeightByUser()]),
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(BATCH_SIZE, 1, LEARNING_RATE),
        model_eval_params=NNEvalHyperParams(None),
        callbacks=[Tell()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    np.random.seed(0)
    main(sys.argv[1], *map(int, sys.argv[2:]))
