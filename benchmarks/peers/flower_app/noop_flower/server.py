"""Federated averaging that records the time of each committed model."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; write a line with the time after each aggregation."""
    config = context.run_config
    tensors = json.loads(Path(str(config["model"])).read_text())
    arrays = ArrayRecord({name: Array(np.zeros(shape, dtype)) for name, dtype, shape in tensors})
    clients = int(config["clients"])

    def committed(_round: int, _arrays: ArrayRecord) -> MetricRecord | None:
        with open(str(config["times"]), "a") as file:
            file.write(f"{time.time()}\n")
        return None

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]), evaluate_fn=committed)
