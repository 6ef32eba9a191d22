"""The reference engine: it trains one client after the other, on one thread of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from fedplat.config import user_code
from fedplat.errors import EngineError, FedplatError, PluginError, UserCodeError
from fedplat.model import Parameters
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.tasks import (
    ClientTraining,
    InProcessEngine,
    Versions,
    describe_task,
    make_error,
    num_examples,
)
from fedplat.simulation.engines.trainers import make_trainer


class LoopEngine(InProcessEngine):
    """Trains each client when its result is fetched."""

    def __init__(self, task: ClientTraining) -> None:
        super().__init__()
        self._federation = task.federation
        self._trainer = make_trainer(task)
        self._versions = Versions(self._trainer.retire)
        self._begun: set[ClientTask] = set()

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._trainer.publish(version, model)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Record the tasks: those that are dropped before their result is fetched are never computed."""
        for task in tasks:
            self._versions.begin(task)
            self._begun.add(task)

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Train the client, or score the version on it."""
        self._begun.remove(task)
        try:
            outcome = self._trainer.answer(task, self._states.begin(task) or {})
        except (EngineError, PluginError, UserCodeError):
            raise
        except FedplatError as exc:  # the error names the client, as that of a worker does
            raise make_error(task, str(exc)) from exc
        except BaseException:  # of the owner's code: the error names the client and the line
            with user_code.wrap_errors(describe_task(task)):
                raise
        finally:
            self._versions.end(task)
        if outcome.contents is not None:
            self._states.put(task, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, task), outcome.metrics)

    @override
    def drop(self, task: ClientTask) -> None:
        if task in self._begun:
            self._begun.remove(task)
            self._versions.end(task)
        self._states.undo(task)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return self._trainer.evaluate(model)
