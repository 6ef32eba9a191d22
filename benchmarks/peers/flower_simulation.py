"""Run the workload in Flower's simulation on Ray. Each actor has one core and one thread, and keeps module and data.

python flower_simulation.py MODEL CLIENTS COHORT SAMPLES ROUNDS
"""

import sys

from flower_client import client_app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from simulated_work import MODELS, print_event

MODEL, (CLIENTS, COHORT, SAMPLES, ROUNDS) = sys.argv[1], map(int, sys.argv[2:])


server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Federated averaging without evaluation, which prints the time of each round."""

    def committed(number, _arrays):
        if number:
            print_event("round")

    strategy = FedAvg(
        fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_train_nodes=COHORT, min_available_nodes=CLIENTS
    )
    initial = ArrayRecord(MODELS[MODEL]().state_dict())
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS, evaluate_fn=committed)


if __name__ == "__main__":
    import ray  # noqa: F401 -- its import is no part of the start

    print_event("start")
    run_simulation(
        server_app,
        client_app(MODEL, CLIENTS, SAMPLES),
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
