"""Run federated averaging as a plain PyTorch loop: the limit of one process without optimizations.

python plain_simulation.py MODEL CLIENTS COHORT SAMPLES ROUNDS
"""

import sys

import numpy as np
import torch
from simulated_work import MODELS, data, print_event, train


def main(model, clients, cohort, samples, rounds):
    """Run federated averaging for the given number of rounds."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # its first use imports for seconds
    print_event("start")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, targets = (torch.from_numpy(array).to(device) for array in data(model, clients, samples))
    module, rng = MODELS[model]().to(device), np.random.default_rng(0)
    base = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in base.items()}
        for client in rng.choice(clients, cohort, replace=False):
            module.load_state_dict(base)
            part = slice(client * samples, (client + 1) * samples)
            train(module, inputs[part], targets[part])
            for name, value in module.state_dict().items():
                total[name] += value
        base = {name: value / cohort for name, value in total.items()}
        print_event("round")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
