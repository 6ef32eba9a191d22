"""Local training of one client on flat vectors, and the client's half of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch

from fedplat.aggregate.local import Arrays, Correction, LocalEnding, UpdateDirection, effective_steps
from fedplat.client_state import ClientState
from fedplat.local_options import LocalOptions
from fedplat.model import Bytes, Parameters
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training import examples, learner, meaning, trainer
from fedplat.pytorch.training.algorithm import build_guarded_algorithm, check_drift
from fedplat.pytorch.training.gradients import LocalTraining
from fedplat.pytorch.vectorized import layout, vmap_gradients
from fedplat.pytorch.vectorized.layout import Base, ParameterLayout, Tensors, UnsuitableError


class FlatTrainer:
    """Trains one client after the other with a module that is created once.

    Raises `UnsuitableError` for unsupported training: mixed precision, example-level privacy, and modules that
    `ParameterLayout` or `Gradients` rejects.
    """

    def __init__(self, trainee: learner.Trainee, options: LocalOptions) -> None:
        if options.precision != "fp32":
            raise UnsuitableError(f'precision = "{options.precision}"; expected "fp32"')
        if options.is_private:
            raise UnsuitableError(f'dp = "{options.dp}": Opacus clips gradients of one client at a time')
        check_algorithm(options)
        self.layout = ParameterLayout(trainee)
        self._trainee, self._options = trainee, options
        self._needs_control = options.build_algorithm().needs_control
        names = [*self.layout.names, *self.layout.state_names]
        self._gradients = vmap_gradients.Gradients(
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
        layout.refuse_server_tensors(base.parameters)
        metrics = trainer.measure_before(self._trainee, base.parameters, work)
        state = self._load(base, work.client_state)
        start = ClientAlgorithmState(self.layout, self._options, base, work.client_state)
        descent = FlatSgd(self.layout, self._options, work.learning_rate, self._weights)
        descent.correct(start.correction.pull, base.weights, start.drift)
        try:
            scores, num_steps = self._run(descent, list(state.values()), work)
        finally:
            self._trainee.hidden.restore()  # a loss that is an object outlives the engine
        self._trainee.check_base_unchanged()
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
        plan = examples.StepSchedule(
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
        scores = LateScores(self._trainee.learner.count_answers, self._trainee.learner.class_weights)
        randomness = learner.use_seed(self._trainee.device, work.seed) if self._gradients.is_random else nullcontext()
        with randomness, torch.no_grad(), trainer.explain_errors(len(work.examples)):
            for number, step in enumerate(steps):
                if number % plan.steps_per_epoch == 0:
                    scores = LateScores(self._trainee.learner.count_answers, self._trainee.learner.class_weights)
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
    """Collects losses, and counts correct answers, with `count` if there is one; `weights` are those of the losses."""

    def __init__(self, count: meaning.CountAnswers | None, weights: meaning.ClassWeights | None = None) -> None:
        self._answers, self._class_weights = count, weights
        self._losses: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._weighed: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._weights: list[float] = []
        self._kept = self._hits = self._num_answers = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch, where `loss` is its mean."""
        self._losses.append(loss)
        self._sizes.append(len(targets))
        if self._class_weights is not None:
            self._weighed.append(targets)
        if isinstance(self._answers, meaning.CountClasses):
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
        self._weigh()
        weights = torch.tensor(self._weights, dtype=torch.float64)
        losses = torch.stack(self._losses).to("cpu", torch.float64)
        total = weights.sum().item()
        means = {"loss": (losses.where(weights > 0, 0.0) @ weights).item() / total} if total else {}
        if self._num_answers:
            means["accuracy"] = self._hits / self._num_answers
        return means

    def _count(self) -> None:
        if self._outputs:
            self._add(torch.cat(self._outputs), torch.cat(self._targets))
            self._outputs, self._targets, self._kept = [], [], 0

    def _weigh(self) -> None:
        """Set the weights of the losses: one pass over all targets, not one for each batch."""
        sizes = self._sizes
        weights = None if self._class_weights is None else self._class_weights(torch.cat(self._weighed))
        if weights is not None and not (weights.dtype is torch.bool and weights.all()):  # most batches have no padding
            rows = weights.reshape(len(weights), -1).sum(1, dtype=torch.float64).cpu()
            self._weights = [each.sum().item() for each in rows.split(sizes)]
        else:
            self._weights = [float(size) for size in sizes]

    def _add(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert self._answers is not None
        if (counted := self._answers(outputs, targets)) is not None:
            self._hits += int(counted[0])
            self._num_answers += int(counted[1])


def check_algorithm(options: LocalOptions) -> None:
    """Raise `UnsuitableError` for an algorithm that does more than correct the gradients of the learner's loss."""
    algorithm = options.build_algorithm()
    reasons = {
        "has its own loss": algorithm.make_loss is not None,
        "computes gradients at other weights": algorithm.perturb is not None,
        "begins at a model of the client's own": algorithm.start is not None,
        "has Nesterov's momentum": algorithm.nesterov,
        "keeps the state of its optimizer": algorithm.keeps_optimizer,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UnsuitableError(f'algorithm = "{options.algorithm_name}" {what}, which needs one client at a time')
    if options.optimizer != "sgd":
        raise UnsuitableError(f'optimizer = "{options.optimizer}" needs one client at a time; expected "sgd"')
    if options.alternate:
        raise UnsuitableError(f'alternate = "{options.alternate}" trains other tensors in each round')
    if options.keep_optimizer:
        raise UnsuitableError("keep_optimizer = true needs one client at a time; expected false")


class ClientAlgorithmState:
    """The algorithm's state at the start of one client's training."""

    def __init__(self, layout: ParameterLayout, options: LocalOptions, base: Base, client_state: ClientState) -> None:
        self._layout, self._base, self._client_state = layout, base, client_state
        self._half, self._note = build_guarded_algorithm(options), options.state_name
        note = client_state.get(self._note)
        self._state: Arrays = {} if note is None else backend.to_torch(note)
        control = layout.as_dict(base.control) if self._half.needs_control else {}
        self.correction: Correction = self._half.begin(control, self._state)
        shapes = dict(zip(layout.shared_names, map(torch.Size, layout.shapes), strict=False))
        check_drift(self.correction.drift, shapes, f'config.algorithm = "{options.algorithm_name}"')

    @property
    def drift(self) -> torch.Tensor | None:
        """The correction's drift as a vector of the shared weights; None if it is empty."""
        drift = self.correction.drift
        if not drift:
            return None
        parts = zip(self._layout.shared_names, self._layout.sizes, strict=False)
        return torch.cat([drift[name].reshape(-1) if name in drift else torch.zeros(size) for name, size in parts])

    def end(self, weights: torch.Tensor, num_steps: int, work: LocalTraining, update: Parameters) -> dict[str, float]:
        """Store the client state, and add the algorithm's part to the update; return the metrics."""
        rate, pull = work.learning_rate, self.correction.pull
        steps = effective_steps(num_steps, learning_rate=rate, momentum=work.options.momentum, pull=pull)
        moved = _LazyDifference(self._layout, self._base.weights, weights)
        ending: LocalEnding = self._half.end(self.correction, self._state, UpdateDirection(moved, rate, steps))
        metrics = {"local_steps": float(num_steps)}
        if steps != num_steps:
            metrics["effective_steps"] = steps
        if ending.remember:
            self._client_state.put(self._note, backend.store_tensors(ending.remember))
        for name, change in backend.to_arrays(ending.update).items():
            update[name] += change
        return metrics


class _LazyDifference(Mapping[str, torch.Tensor]):
    """The difference `start - weights` of each shared parameter, computed at the first access."""

    def __init__(self, layout: ParameterLayout, start: torch.Tensor, weights: torch.Tensor) -> None:
        self._layout, self._start, self._weights = layout, start, weights
        self._difference: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._difference is None:
            self._difference = self._layout.as_dict(self._start - self._weights[: len(self._start)])
        return self._difference[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.shared_names)

    def __len__(self) -> int:
        return len(self._layout.shared_names)


class FlatSgd:
    """SGD on weights [size], or [clients, size] where the first rows are still in training.

    Per step: the gradient's norm is bounded, then `pull (w - w₀) + drift` is added to its shared part, then SGD updates
    the weights, with weight decay and momentum as in `torch.optim.SGD`.
    """

    def __init__(
        self, layout: ParameterLayout, options: LocalOptions, learning_rate: float, weights: torch.Tensor
    ) -> None:
        self._layout, self._options, self._learning_rate = layout, options, learning_rate
        self._weights = weights
        self._pull, self._start, self._drift = 0.0, weights, None
        self._gradient: torch.Tensor | None = None
        self._velocity: torch.Tensor | None = None
        self._is_plain = not (options.momentum or options.weight_decay or options.max_grad_norm)

    def correct(self, pull: float, start: torch.Tensor, drift: torch.Tensor | None) -> None:
        """Set the algorithm's correction of the gradients of the shared weights; `start` is w₀."""
        self._pull, self._start, self._drift = pull, start, drift
        self._is_plain = self._is_plain and not pull and drift is None

    def step(self, views: Tensors, gradients: Tensors) -> None:
        """Update the weights; `views` are the parameters in the rows that are still in training."""
        if self._is_plain:  # copying the gradients into one vector would take longer than the whole update
            layout.add_tensors(views, gradients, -self._learning_rate)
            return
        if self._gradient is None:
            self._gradient = torch.empty_like(self._weights)
        rows = slice(len(gradients[0])) if self._weights.ndim == 2 else slice(None)
        weights, gradient = self._weights[rows], self._gradient[rows]
        layout.copy_tensors(self._layout.views(gradient), gradients)
        self._correct(weights, gradient, rows)
        if self._options.weight_decay:
            gradient.add_(weights, alpha=self._options.weight_decay)
        weights.sub_(self._with_momentum(gradient, rows), alpha=self._learning_rate)

    def _correct(self, weights: torch.Tensor, gradient: torch.Tensor, rows: slice) -> None:
        if limit := self._options.max_grad_norm:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        shared = gradient[..., : self._layout.num_shared]
        if self._pull:
            shared.add_(weights[..., : self._layout.num_shared] - self._start, alpha=self._pull)
        if self._drift is not None:
            shared.add_(self._drift[rows])

    def _with_momentum(self, gradient: torch.Tensor, rows: slice) -> torch.Tensor:
        if not self._options.momentum:
            return gradient
        if self._velocity is None:
            self._velocity = torch.zeros_like(self._weights)
        return self._velocity[rows].mul_(self._options.momentum).add_(gradient)
