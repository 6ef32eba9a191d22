"""Local training and evaluation, the same for real and simulated clients, also for those that keep own models.

A client reports a model, and its update is the rounded difference of this model and the received one. The client loses
exactly the same numbers, so that the sum of all models stays the same but for the rounding of the additions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import torch

from fedplat.aggregate.local import (
    CONTROL,
    Arrays,
    Correction,
    LocalAlgorithm,
    LocalEnding,
    LocalStart,
    StartContext,
    UpdateDirection,
    effective_steps,
)
from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.model import SERVER, Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training import examples, meaning
from fedplat.pytorch.training.algorithm import build_guarded_algorithm, check_drift, select_control
from fedplat.pytorch.training.examples import Examples
from fedplat.pytorch.training.gradients import LocalTraining
from fedplat.pytorch.training.learner import Trainee, make_own_loss, use_seed
from fedplat.pytorch.training.stepper import ENTRY, StepAlgorithm, Stepper

_EVALUATION_BATCH_SIZE = 256


def train(trainee: Trainee, parameters: Parameters, work: LocalTraining) -> Mapping[str, float]:
    """Train the job's model in place, and store the client state; return the metrics.

    The result of an algorithm with an own start is the received model plus what the client exchanges with it.

    These are `loss` and, for classification, `accuracy` (both of the model during training, over the last epoch),
    `local_steps`, `effective_steps` if it differs from them, and `loss_before` if requested. A private training instead
    of scores returns `epsilon`, `noise_multiplier` and `private_steps`, over the whole job so far. Raises `ModelError`
    if the model does not fit the module, and `PrivacyLimitError`.
    """
    with trainee.train_in_turn(work.options.alternate, work.round_number):
        return _train(trainee, parameters, work)


def _train(trainee: Trainee, parameters: Parameters, work: LocalTraining) -> Mapping[str, float]:
    metrics = measure_before(trainee, parameters, work)
    trainee.load(parameters, work.client_state)
    start = _Start(trainee, parameters, work)
    try:
        with use_seed(trainee.device, work.seed), explain_errors(len(work.examples)):
            scores, num_steps = _run(trainee, start, work)
    finally:
        trainee.forget()  # a loss that is an object outlives the module
    direction = start.measure_direction(trainee, num_steps)
    ending = start.end(direction)
    trainee.save(parameters, work.client_state)
    if start.own is not None:
        start.own.report(parameters)
        metrics |= start.own.metrics
    for name, change in backend.to_arrays(ending.update).items():
        parameters[name] += change
    metrics["local_steps"] = float(num_steps)
    if direction.steps != num_steps:
        metrics["effective_steps"] = direction.steps
    return {**scores, **metrics}


def measure_before(trainee: Trainee, parameters: Parameters, work: LocalTraining) -> dict[str, float]:
    """Return `loss_before` if the training requests it. Raises `ModelError` if no target counts in the loss."""
    if not work.options.measure_before:
        return {}
    means = evaluate(trainee, parameters, work.examples, client_state=work.client_state)
    if "loss" not in means:
        raise ModelError(
            "the loss ignores the targets of all examples, and the job requests the loss before the training; expected "
            "targets that count"
        )
    return {"loss_before": means["loss"]}


def evaluate(
    trainee: Trainee,
    parameters: Parameters,
    examples: Examples,
    batch_size: int = _EVALUATION_BATCH_SIZE,
    client_state: ClientState | None = None,
    after_batch: Callable[[float], object] = lambda fraction: None,
) -> dict[str, float]:
    """Score the job's model, with the client's personal layers, on examples, without training.

    `after_batch` is called with the completed fraction.
    """
    trainee.load(parameters, client_state or ClientState())
    try:
        with use_seed(trainee.device, 0):  # also a module that draws has the same metrics in all processes
            sums = trainee.evaluate(examples, batch_size, lambda done: after_batch(done / len(examples)))
    finally:
        trainee.forget()
    return sums.means(trainee.learner.metrics)


@contextmanager
def explain_errors(num_examples: int) -> Generator[None]:
    """Turn PyTorch's errors for BatchNorm and a single example, and for types and gradients, into `ModelError`s."""
    try:
        yield
    except RuntimeError as exc:
        if "does not require grad" in str(exc):
            raise ModelError(
                "the loss does not depend on any tensor that is trained; expected a module whose outputs are computed "
                "from parameters with requires_grad = True"
            ) from exc
        if "same dtype" not in str(exc):
            raise
        raise ModelError(
            f"the inputs are not of the type of the weights: {exc}; convert them, such as inputs.astype(numpy.float32)"
        ) from exc
    except ValueError as exc:
        if "more than 1 value per channel" not in str(exc):
            raise
        raise ModelError(
            f"BatchNorm cannot be trained on a single example, and a batch of the client's {num_examples} has no more; "
            "expected at least 2 examples (min_examples of a partition), a larger batch_size, or GroupNorm"
        ) from exc


def evaluate_batches(
    trainee: Trainee,
    examples: Examples,
    order: Iterable[examples.Indices],
    after_batch: Callable[[int], object] = lambda done: None,
) -> meaning.Scores:
    """Return the scores of the module, as it is, on some batches, without training.

    `after_batch` is called with the number of examples done.
    """
    return trainee.evaluate_batches(examples, order, after_batch)


class _Start:
    """The start of a training: its initial weights and its algorithm."""

    def __init__(self, trainee: Trainee, parameters: Parameters, work: LocalTraining) -> None:
        self._work = work
        self._note = work.options.state_name
        self._half = build_guarded_algorithm(work.options)
        trainee.check_algorithm(work.options, self._half)
        self.weights = trainee.start_weights(parameters)
        control = _control_variates(trainee, parameters, self.weights, work) if self._half.needs_control else {}
        note = work.client_state.get(self._note)
        self._state = {} if note is None else _move_to(trainee.device, note)
        self.correction: Correction = self._half.begin(control, self._state)
        check_drift(
            self.correction.drift,
            {name: weight.shape for name, weight in self.weights.items()},
            f'config.algorithm = "{work.options.algorithm_name}"',
        )
        self._trainee = trainee
        self.keeps_optimizer = self._half.keeps_optimizer or work.options.keep_optimizer
        self.own: OwnStart | None = None
        if self._half.start is not None:
            self.own = OwnStart(self._half, trainee, parameters, self._state, work.learning_rate)

    def steps(self) -> StepAlgorithm:
        """Return what the algorithm computes in each step; the module must have the received values."""
        work = self._work
        return StepAlgorithm(
            loss=make_own_loss(self._half, self._trainee, work.examples, self._state, work.seed),
            correction=self.correction,
            start=self.weights,
            perturb=self._half.perturb,
            exchange={} if self.own is None else self.own.exchange,
            nesterov=self._half.nesterov,
        )

    def measure_direction(self, trainee: Trainee, num_steps: int) -> UpdateDirection:
        """Return the change of the weights, and the effective number of steps."""
        trained, rate = trainee.parameters(), self._work.learning_rate
        moved = {name: weights - trained[name].detach() for name, weights in self.weights.items()}
        steps = float(num_steps)
        if self.own is not None:
            return UpdateDirection(moved, rate, steps, self.own.own_weights())
        if self._work.optimizer_factory is None:  # the effect of another optimizer's steps is unknown
            momentum, pull = self._work.options.momentum, self.correction.pull
            steps = effective_steps(num_steps, learning_rate=rate, momentum=momentum, pull=pull)
        own = self._half.make_loss is not None
        return UpdateDirection(moved, rate, steps, {name: trained[name].detach() for name in moved} if own else {})

    def end(self, direction: UpdateDirection) -> LocalEnding:
        """Return what the algorithm adds to the update; store its client state."""
        ending = self._half.end(self.correction, self._state, direction)
        if ending.remember:
            self._work.client_state.put(self._note, backend.store_tensors(ending.remember))
        return ending


def _run(trainee: Trainee, start: _Start, work: LocalTraining) -> tuple[Mapping[str, float], int]:
    """Run all steps; return the metrics, and the number of steps that changed the weights."""
    stepper = Stepper(
        trainee.parameters(),
        trainee.step_options(work.options),
        work.learning_rate,
        start.steps(),
        work.optimizer_factory,
        work.gradients.clip_gradients,
    )
    if not start.keeps_optimizer:
        return _run_steps(trainee, stepper, work)
    stepper.restore(work.client_state.get(ENTRY))
    result = _run_steps(trainee, stepper, work)
    if state := stepper.pack():
        work.client_state.put(ENTRY, state)
    return result


def _run_steps(trainee: Trainee, stepper: Stepper, work: LocalTraining) -> tuple[Mapping[str, float], int]:
    if work.options.is_private:
        from fedplat.pytorch.training import dp_sgd

        return dp_sgd.run(trainee, stepper, work)
    scores, num_steps = _steps(trainee, stepper, work)
    return work.gradients.sum_scores(scores).means(), num_steps


def _steps(trainee: Trainee, stepper: Stepper, work: LocalTraining) -> tuple[meaning.Scores, int]:
    """Return the scores of the last epoch, and the number of steps that changed the weights."""
    plan = examples.StepSchedule(
        num_examples=len(work.examples),
        options=work.options,
        seed=work.seed,
        fraction=work.fraction,
        smallest=work.gradients.smallest_batch(trainee),
    )
    scores, num_steps = meaning.Scores(), 0
    for number, step_scores in enumerate(work.gradients.compute_steps(trainee, stepper, plan, work.examples)):
        if number % plan.steps_per_epoch == 0:
            scores = meaning.Scores()
        scores.extend(step_scores)
        num_steps += stepper.step()
        if not work.after_step(number + 1, plan.num_steps):
            break
    return scores, num_steps


def _control_variates(
    trainee: Trainee, parameters: Parameters, names: Iterable[str], work: LocalTraining
) -> dict[str, torch.Tensor]:
    """Return the model's control variates. Raises `ModelError` if the model has none, `ValueError` without SGD."""
    algorithm = work.options.algorithm_name
    if work.optimizer_factory is not None:
        raise ValueError(f'the algorithm "{algorithm}" requires SGD; expected a trainer without its own optimizer')
    model = backend.to_torch(parameters)
    found = select_control(model, names, f'the algorithm "{algorithm}"')
    return {name: tensor.to(trainee.device) for name, tensor in found.items()}


def _move_to(device: torch.device, note: Parameters) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in backend.to_torch(note).items()}


class OwnStart:
    """The result of an algorithm's `start`, loaded into the module."""

    def __init__(
        self, algorithm: LocalAlgorithm, trainee: Trainee, parameters: Parameters, remembered: Arrays, rate: float
    ) -> None:
        """Load the client's model; the module must have the received values. Raises `ModelError`."""
        assert algorithm.start is not None
        self._trainee = trainee
        model = backend.to_torch(parameters)
        values = {name: value for name, value in model.items() if not name.startswith((CONTROL, SERVER))}
        received = {
            name: value.to(trainee.device, copy=True) for name, value in values.items() if value.is_floating_point()
        }
        trained = [name for name in trainee.parameters() if name in received]
        start = algorithm.start(StartContext(received, remembered, trained, rate))
        self.metrics: Mapping[str, float] = start.metrics
        _check_names(start, received)
        self.reported = {name: received[name] + start.exchange[name] for name in received}
        exchange = {name: self.reported[name] - received[name] for name in received}
        self.exchange = {name: exchange[name] for name in trained}
        self._load(start.weights, exchange, trained)

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return all floating-point tensors of the client's model that are not personal."""
        tensors = self._trainee.shared_tensors()
        return {name: tensors[name].detach() for name in self.reported}

    def report(self, parameters: Parameters) -> None:
        """Write the model that the client reports: the received one plus the exchange."""
        for name, array in backend.to_arrays(self.reported).items():
            parameters[name][...] = array

    def _load(self, weights: Arrays, exchange: Arrays, trained: list[str]) -> None:
        module = self._trainee.shared_tensors()
        shared = {module[name].data_ptr() for name in trained}
        with torch.no_grad():
            for name, weight in weights.items():
                if name in trained:
                    module[name].copy_(weight)
                elif module[name].data_ptr() not in shared:  # else it is another name of a trained tensor
                    module[name].copy_(weight - exchange[name])


def _check_names(start: LocalStart, received: Arrays) -> None:
    for name, tensor in received.items():
        for arrays in (start.weights, start.exchange):
            if name not in arrays or arrays[name].shape != tensor.shape:
                raise ModelError(
                    f"the client's own model has no tensor {name!r} of the shape {list(tensor.shape)}; expected the "
                    "tensors of the job's model: it was stored for another model"
                )
