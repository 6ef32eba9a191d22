"""The ServerApp."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader

from digits.task import Net, load_pictures
from digits.task import test as test_network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds, and save the model."""
    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate_centrally,
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def evaluate_centrally(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on all pictures."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_network(net, DataLoader(load_pictures(), batch_size=256))
    return MetricRecord({"loss": loss, "accuracy": accuracy})
