"""Local training of one client on flat vectors."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fedplat.client_state import ClientState
from fedplat.local_options import LocalOptions
from fedplat.model import Bytes, Parameters
from fedplat.pytorch.training.gradients import LocalTraining
from fedplat.pytorch.training.learner import Trainee, use_seed
from fedplat.pytorch.training.meaning import CountAnswers, CountClasses
from fedplat.pytorch.training.schedule import StepSchedule
from fedplat.pytorch.training.trainer import evaluate, explain_errors
from fedplat.pytorch.vectorized import layout
from fedplat.pytorch.vectorized.client_algorithm import ClientAlgorithmState, FlatSgd, check_algorithm
from fedplat.pytorch.vectorized.gradients import Gradients
from fedplat.pytorch.vectorized.layout import Base, ParameterLayout, Tensors, UnsuitableError


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
    scaled = layout.scale_tensors(batch, share)
    return layout.add_pairs(gradients, scaled) if gradients else scaled


_MAX_KEPT_ENTRIES = 1 << 20
"""Entries of outputs that are kept before the correct answers are counted."""


class LateScores:
    """Collects losses, and counts correct answers, with `count` if there is one."""

    def __init__(self, count: CountAnswers | None) -> None:
        self._answers = count
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._kept = self._hits = self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch, where `loss` is its mean."""
        self._losses.append(loss)
        self._sizes.append(len(targets))
        if isinstance(self._answers, CountClasses):
            if not self._answers.suits(outputs, targets):
                return
            self._outputs.append(outputs)
            self._targets.append(targets)
            self._kept += outputs.numel()
            if self._kept > _MAX_KEPT_ENTRIES:
                self._count()
        elif self._answers is not None:
            self._add(outputs, targets)

    def means(self) -> dict[str, float]:
        """Return `loss`, and `accuracy` if there are answers."""
        self._count()
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        losses = torch.stack(self._losses).to("cpu", torch.float64)
        means = {"loss": (losses @ sizes).item() / sum(self._sizes)}
        if self._num_answers:
            means["accuracy"] = self._hits / self._num_answers
        return means

    def _count(self) -> None:
        if self._outputs:
            self._add(torch.cat(self._outputs), torch.cat(self._targets))
            self._outputs, self._targets, self._kept = [], [], 0

    def _add(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert self._answers is not None
        if (counted := self._answers(outputs, targets)) is not None:
            self._hits += int(counted[0])
            self._num_answers += int(counted[1])
