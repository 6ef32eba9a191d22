"""The client of `flower_simulation.py`, in a separate module, so that actors import it and keep its state."""

import functools

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from simulated_work import MODELS, data, train


@functools.cache
def resident(model, clients, samples):
    """Create the state that an actor keeps from one client to the next."""
    torch.set_num_threads(1)
    return MODELS[model](), *map(torch.from_numpy, data(model, clients, samples))


def client_app(model, clients, samples):
    """Train the client of a node. Nodes are numbered from 0."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        module, inputs, targets = resident(model, clients, samples)
        client = int(context.node_config["partition-id"])
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        part = slice(client * samples, (client + 1) * samples)
        train(module, inputs[part], targets[part])
        arrays, metrics = ArrayRecord(module.state_dict()), MetricRecord({"num-examples": samples})
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app
