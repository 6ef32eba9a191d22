"""The workload of the comparison of simulators. All of them use it, so it imports only torch and NumPy."""

import json
import time

import numpy as np
import torch
from torch import nn


def mlp():
    """Build McMahan's 2NN."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def logistic():
    """Build logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def lenet():
    """Build LeNet-5."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def cifar():
    """Build the CNN for CIFAR-10 of TensorFlow's tutorial."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


MODELS = {"LR": logistic, "2NN": mlp, "LeNet": lenet, "CIFAR": cifar}
BATCH_SIZE, LEARNING_RATE = 10, 0.01


def data(model, clients, samples):
    """Create random images of MNIST's or CIFAR-10's size, [clients * samples, ...], and labels, [clients * samples]."""
    rng = np.random.default_rng(0)
    count = clients * samples
    image = (3, 32, 32) if model == "CIFAR" else (1, 28, 28)
    return rng.standard_normal((count, *image), dtype=np.float32), rng.integers(0, 10, count)


def train(module, inputs, targets):
    """Train for one epoch of plain PyTorch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    order = torch.randperm(len(targets), device=targets.device)
    for start in range(0, len(order), BATCH_SIZE):
        batch = order[start : start + BATCH_SIZE]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs[batch]), targets[batch]).backward()
        optimizer.step()


def print_event(event):
    """Print the time of an event."""
    print(json.dumps({"event": event, "time": time.time()}), flush=True)
