"""Local training and evaluation: the same for a client in the field and for a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from fedplat.aggregate.local import CONTROL, Correction, LocalEnding, UpdateDirection, effective_steps
from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.learner import Trainee, use_seed
from fedplat.pytorch.training.metrics import Scores
from fedplat.pytorch.training.schedule import Indices, StepSchedule, in_order
from fedplat.pytorch.training.stepper import Stepper
from fedplat.pytorch.training.work import LocalTraining

_EVALUATED_AT_ONCE = 256


def train(trainee: Trainee, parameters: Parameters, work: LocalTraining) -> Mapping[str, float]:
    """Trains the job's model in place, and writes what the client remembers into its memory; returns the metrics.

    These are `loss` and, where targets are classes, `accuracy` (of the model in training, over the last epoch),
    `local_steps`, `effective_steps` where they are not the same, and `loss_before` if it was asked for; of a private
    training `epsilon`, `noise_multiplier` and `private_steps`, all of the job so far, instead of scores. Raises
    `ModelError` when the model does not fit the module, and `PrivacyLimitError`.
    """
    metrics: dict[str, float] = {}
    if work.options.measure_before:
        metrics["loss_before"] = evaluate(trainee, parameters, work.examples, memory=work.client_state)["loss"]
    trainee.load(parameters, work.client_state)
    start = _Start(trainee, parameters, work)
    with use_seed(trainee.device, work.seed):
        scores, num_steps = _run(trainee, start, work)
    way = start.way(trainee, num_steps)
    ending = start.ending(way)
    trainee.save(parameters, work.client_state)
    for name, change in backend.to_arrays(ending.update).items():
        parameters[name] += change
    metrics["local_steps"] = float(num_steps)
    if way.steps != num_steps:
        metrics["effective_steps"] = way.steps
    return {**scores, **metrics}


def evaluate(
    trainee: Trainee,
    parameters: Parameters,
    examples: Examples,
    batch_size: int = _EVALUATED_AT_ONCE,
    memory: ClientState | None = None,
    after_batch: Callable[[float], object] = lambda fraction: None,
) -> dict[str, float]:
    """Scores the job's model, with the client's own layers, on examples; nothing is trained.

    `after_batch` is told the part that is done.
    """
    trainee.load(parameters, memory or ClientState())
    order = in_order(len(examples), batch_size)
    return evaluate_batches(trainee, examples, order, lambda done: after_batch(done / len(examples))).means()


def evaluate_batches(
    trainee: Trainee,
    examples: Examples,
    order: Iterable[Indices],
    after_batch: Callable[[int], object] = lambda done: None,
) -> Scores:
    """The scores of some batches with the module as it is, which is not trained.

    `after_batch` is told how many examples are done.
    """
    trainee.module.eval()
    scores, done = Scores(), 0
    with torch.no_grad():
        for inputs, targets in examples.batches(order):
            outputs = trainee.module(inputs)
            scores.add(trainee.learner.loss(outputs, targets), outputs, targets)
            done += len(targets)
            after_batch(done)
    return scores


class _Start:
    """Where a training begins, and by which algorithm."""

    def __init__(self, trainee: Trainee, parameters: Parameters, work: LocalTraining) -> None:
        self._work = work
        self._note = work.options.algorithm
        self._half = work.options.client_half()
        given = {name: tensor.to(trainee.device) for name, tensor in backend.to_torch(parameters).items()}
        self.weights = {name: given[name] for name in trainee.parameters() if name not in trainee.personal}
        control = _control(given, self.weights, work) if self._half.needs_control else {}
        note = work.client_state.get(self._note)
        self._remembered = {} if note is None else _on(trainee.device, note)
        self.correction: Correction = self._half.begin(control, self._remembered)

    def way(self, trainee: Trainee, num_steps: int) -> UpdateDirection:
        """How far the training went."""
        trained, rate = trainee.parameters(), self._work.learning_rate
        moved = {name: weights - trained[name].detach() for name, weights in self.weights.items()}
        if self._work.make_optimizer is not None:  # what steps of a user's optimizer count for, nobody knows
            return UpdateDirection(moved, rate, num_steps)
        momentum, pull = self._work.options.momentum, self.correction.pull
        return UpdateDirection(
            moved, rate, effective_steps(num_steps, learning_rate=rate, momentum=momentum, pull=pull)
        )

    def ending(self, way: UpdateDirection) -> LocalEnding:
        """What the algorithm adds to the update; what the client remembers goes to its memory."""
        ending = self._half.end(self.correction, self._remembered, way)
        if ending.remember:
            self._work.client_state.put(self._note, backend.from_state_dict(ending.remember))
        return ending


def _run(trainee: Trainee, start: _Start, work: LocalTraining) -> tuple[Mapping[str, float], int]:
    """All steps; what is told of them, and the number of steps that moved the weights."""
    stepper = Stepper(
        trainee.parameters(), work.options, work.learning_rate, start.correction, start.weights, work.make_optimizer
    )
    if work.options.is_private:
        from fedplat.pytorch.training import dp_sgd

        return dp_sgd.run(trainee, stepper, work)
    scores, num_steps = _steps(trainee, stepper, work)
    return work.passes.total(scores).means(), num_steps


def _steps(trainee: Trainee, stepper: Stepper, work: LocalTraining) -> tuple[Scores, int]:
    """The scores of the last epoch, and the number of steps."""
    plan = StepSchedule(
        num_examples=len(work.examples),
        options=work.options,
        seed=work.seed,
        fraction=work.fraction,
        smallest=work.passes.smallest_batch(trainee),
    )
    scores, num_steps = Scores(), 0
    for number, found in enumerate(work.passes.over(trainee, stepper, plan, work.examples)):
        if number % plan.steps_per_epoch == 0:
            scores = Scores()
        scores.join(found)
        num_steps += stepper.step()
        if not work.after_step(number + 1, plan.num_steps):
            break
    return scores, num_steps


def _control(given: Mapping[str, torch.Tensor], names: Iterable[str], work: LocalTraining) -> dict[str, torch.Tensor]:
    """The model's control variates."""
    algorithm = work.options.algorithm
    if work.make_optimizer is not None:
        raise ValueError(f'the algorithm "{algorithm}" is one of SGD; expected no optimizer of the trainer\'s own')
    if missing := [name for name in names if CONTROL + name not in given]:
        raise ModelError(
            f'the model has no tensor {CONTROL + missing[0]!r}, which the algorithm "{algorithm}" needs; expected a '
            "job whose aggregation rule adds it"
        )
    return {name: given[CONTROL + name] for name in names}


def _on(device: torch.device, note: Parameters) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in backend.to_torch(note).items()}
