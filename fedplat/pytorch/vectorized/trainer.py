"""Local training of one client on flat vectors."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fedplat.client_state import ClientState
from fedplat.local_options import LocalOptions
from fedplat.model import Bytes, Parameters
from fedplat.pytorch.training.learner import Trainee, use_seed
from fedplat.pytorch.training.schedule import StepSchedule
from fedplat.pytorch.training.trainer import evaluate, explain_errors
from fedplat.pytorch.training.work import LocalTraining
from fedplat.pytorch.vectorized import foreach
from fedplat.pytorch.vectorized.client_algorithm import ClientAlgorithmState, check_algorithm
from fedplat.pytorch.vectorized.foreach import Tensors
from fedplat.pytorch.vectorized.gradients import Gradients
from fedplat.pytorch.vectorized.layout import Base, ParameterLayout, UnsuitableError
from fedplat.pytorch.vectorized.scores import LateScores
from fedplat.pytorch.vectorized.sgd import FlatSgd


class FlatTrainer:
    """Trains one client after the other with a module that is created once.

    Raises `UnsuitableError` for unsupported training: mixed precision, example-level privacy, and modules that
    `ParameterLayout` or `Gradients` rejects.
    """

    def __init__(self, trainee: Trainee, options: LocalOptions) -> None:
        if options.precision != "fp32":
            raise UnsuitableError(f'precision = "{options.precision}"; expected "fp32"')
        if options.is_private:
            raise UnsuitableError(f'dp = "{options.dp}": Opacus clips gradients of one client at a time')
        check_algorithm(options)
        self.layout = ParameterLayout(trainee)
        self._trainee, self._options = trainee, options
        self._needs_control = options.build_algorithm().needs_control
        names = [*self.layout.names, *self.layout.state_names]
        self._gradients = Gradients(
            trainee.module, trainee.learner.batch_loss, names, len(self.layout.names), trainee.hidden.is_changed
        )
        self._weights = torch.zeros(self.layout.size)
        self._views = self.layout.views(self._weights)

    def base(self, parameters: Parameters) -> Base:
        """Prepare a model for `train`; it has to fit the module."""
        return self.layout.base(parameters, self._needs_control)

    def train(
        self, base: Base, work: LocalTraining, buffer: Bytes | None = None
    ) -> tuple[Parameters, dict[str, float]]:
        """Return the update, in `buffer` if given, and the metrics of one client; store its client state."""
        metrics: dict[str, float] = {}
        if self._options.measure_before:
            before = evaluate(self._trainee, base.parameters, work.examples, client_state=work.client_state)
            metrics["loss_before"] = before["loss"]
        state = self._load(base, work.client_state)
        start = ClientAlgorithmState(self.layout, self._options, base, work.client_state)
        descent = FlatSgd(self.layout, self._options, work.learning_rate, self._weights)
        descent.correct(start.correction.pull, base.weights, start.drift)
        try:
            scores, num_steps = self._run(descent, list(state.values()), work)
        finally:
            self._trainee.hidden.restore()  # a loss that is an object outlives the engine
        update = self.layout.update(base, self._weights, state, buffer)
        metrics |= start.end(self._weights, num_steps, work, update)
        self.layout.save(self._weights, state, work.client_state)
        return update, {**scores.means(), **metrics}

    def _load(self, base: Base, client_state: ClientState) -> dict[str, torch.Tensor]:
        """Load the initial weights of a training; return copies of the module's other values."""
        self._trainee.hidden.restore()
        self._weights[: self.layout.num_shared].copy_(base.weights)
        state = {**base.state, **self.layout.load_personal(self._weights, client_state)}
        return {name: state[name].clone() for name in self.layout.state_names}

    def _run(self, descent: FlatSgd, state: Tensors, work: LocalTraining) -> tuple[LateScores, int]:
        plan = StepSchedule(
            num_examples=len(work.examples),
            options=work.options,
            seed=work.seed,
            fraction=work.fraction,
            smallest=self._trainee.smallest_batch,
        )
        steps = [plan.batches_of(step) for step in plan.steps()]
        batches = work.examples.batches(batch for step in steps for batch in step)
        tensors = [*self._views, *state]
        if not self._trainee.module.training:  # after an evaluation; train() visits all submodules, which is slow
            self._trainee.module.train()
        scores = LateScores(self._trainee.learner.count_answers)
        randomness = use_seed(self._trainee.device, work.seed) if self._gradients.is_random else nullcontext()
        with randomness, torch.no_grad(), explain_errors(len(work.examples)):
            for number, step in enumerate(steps):
                if number % plan.steps_per_epoch == 0:
                    scores = LateScores(self._trainee.learner.count_answers)
                gradients: Tensors = ()
                num_examples = sum(len(batch) for batch in step)
                for batch in step:
                    inputs, targets = next(batches)
                    result = self._gradients(tensors, inputs, targets)
                    scores.add(result.loss, result.outputs, targets)
                    gradients = accumulate_gradients(gradients, result.gradients, len(batch) / num_examples)
                descent.step(self._views, gradients)
        return scores, plan.num_steps


def accumulate_gradients(gradients: Tensors, batch: Tensors, share: float) -> Tensors:
    """Add the gradients of one more batch, which is a share of the step's examples, to those of the step so far."""
    if share == 1.0:
        return batch
    scaled = foreach.scale_tensors(batch, share)
    return foreach.add_pairs(gradients, scaled) if gradients else scaled
