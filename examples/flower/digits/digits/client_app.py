"""The ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, load_data
from digits.task import test as test_network
from digits.task import train as train_network

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"], context.run_config["batch-size"]
    )
    loss = train_network(net, data, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, data = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"], context.run_config["batch-size"]
    )
    loss, accuracy = test_network(net, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
