"""Local training with the ClientApp of a Flower app, in jobs of any kind (extra "flower")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy.typing as npt
from typing_extensions import override

from fedplat import errors, extras
from fedplat.flower.app import Config, FlowerApp
from fedplat.model import FLOATING, Parameters
from fedplat.model.schema import MESSAGE_KEY
from fedplat_client.task import EvaluateResult, Task, TrainResult

try:
    from fedplat.flower.apps import EMPTY_STATE, ClientAppRunner, NodeAnswer
    from fedplat.flower.claims import read_claims
    from fedplat.flower.records import NUM_EXAMPLES, PackedMessage, make_request, read_reply
except ImportError as exc:
    raise errors.MissingExtraError(
        f"FlowerTrainer needs flwr, which is not installed; install it with: {extras.install_command('flower')}"
    ) from exc

STATE = "flower-context"
"""The entry of the client state that has the app's `Context.state`."""


@dataclass(frozen=True, kw_only=True)
class FlowerTrainer:
    """A trainer and an evaluator that call a ClientApp.

    ```python
    trainer = FlowerTrainer(app=read_app(Path("quickstart")), node_config={"partition-id": 0, "num-partitions": 10})
    client.add_trainer("quickstart", trainer)
    client.add_evaluator("quickstart", trainer.evaluate)
    ```

    In a job with the table `[flower]` the app answers the messages of its ServerApp. In any other job it receives the
    model as the ArrayRecord `arrays`, and the job's `[config]` with `server-round` as the
    ConfigRecord `config`. It replies with an ArrayRecord, its model, and a MetricRecord, which has `num-examples`. Its
    `Context.state` is client state: it counts only if the update was merged. The app is imported once.
    """

    app: FlowerApp
    node_config: Mapping[str, bool | int | float | str] = field(default_factory=dict[str, bool | int | float | str])
    """`Context.node_config`, such as the number of this client's partition of the data."""
    node_id: int = 1
    """`Context.node_id`."""

    def __post_init__(self) -> None:
        _ = self._runner  # now: an app that cannot be imported is an error at the start

    def __call__(self, task: Task) -> TrainResult:
        """Let the app train, or answer a message of its ServerApp. Raises `FlowerError` or `UserCodeError`."""
        if MESSAGE_KEY in task.parameters:
            return self._reply(task)
        arrays, metrics = self._answer(task, "train")
        if arrays is None:
            raise errors.FlowerError(
                f"the ClientApp of {self.app.name} answered train without arrays; expected an ArrayRecord"
            )
        return TrainResult(parameters=_fit(arrays, task.parameters), num_examples=self._count(metrics), metrics=metrics)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Let the app evaluate. Raises `FlowerError` or `UserCodeError`."""
        _, metrics = self._answer(task, "evaluate")
        return EvaluateResult(num_examples=self._count(metrics), metrics=metrics)

    def _reply(self, task: Task) -> TrainResult:
        """Answer the message of a job with a Flower app; its config is the run config."""
        config = {**self.app.run_config, **task.config}
        answer = self._call(task, task.parameters, config)
        num_examples, metrics = read_claims(answer.reply.content)
        return _MessageReply(answer.reply, num_examples, metrics)

    @cached_property
    def _runner(self) -> ClientAppRunner:
        return ClientAppRunner(self.app)

    def _answer(self, task: Task, kind: str) -> tuple[Mapping[str, npt.NDArray[Any]] | None, dict[str, float]]:
        request = make_request(task.parameters, {**task.config, "server-round": task.round}, kind)
        return read_reply(self._call(task, request, self.app.run_config).reply.content, self.app.name)

    def _call(self, task: Task, request: Parameters, run_config: Config) -> NodeAnswer:
        """Call the app with a message, and keep its state."""
        task.progress(0.0)
        state = task.client_state.get(STATE)
        answer = self._runner.answer(request, self.node_id, self.node_config, run_config, state)
        if state is not None or answer.state is not EMPTY_STATE:
            task.client_state.put(STATE, answer.state)
        task.progress(1.0)
        return answer

    def _count(self, metrics: dict[str, float]) -> float:
        """Remove the number of examples from the metrics and return it."""
        if NUM_EXAMPLES not in metrics:
            raise errors.FlowerError(
                f"the ClientApp of {self.app.name} answered without the metric {NUM_EXAMPLES}; expected it in its "
                "MetricRecord"
            )
        return metrics.pop(NUM_EXAMPLES)


class _MessageReply(TrainResult):
    """The reply to a message, which is not an update of the message's arrays."""

    def __init__(self, reply: PackedMessage, num_examples: float, metrics: Mapping[str, float]) -> None:
        super().__init__(delta={}, num_examples=num_examples, metrics=metrics)
        self._reply = reply

    @override
    def to_update(self, base: Parameters) -> Parameters:
        return self._reply.to_parameters()

    @override
    def to_pieces(self, base: Parameters) -> tuple[memoryview, ...]:
        return self._reply.pieces


def _fit(arrays: Mapping[str, npt.NDArray[Any]], model: Parameters) -> dict[str, npt.NDArray[Any]]:
    """Return arrays with the model's floating-point types: some apps compute in float64."""
    floating = {tensor.name for tensor in model.schema.tensors if tensor.dtype in FLOATING}
    return {
        name: values.astype(model[name].dtype) if name in floating and values.dtype.kind == "f" else values
        for name, values in arrays.items()
    }
