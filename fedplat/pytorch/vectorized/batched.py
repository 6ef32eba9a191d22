"""Local training of many clients at once: the first step of all, then the second of all, and so on.

Clients are sorted by their number of steps, so that those still in training are always the first rows. A short last
batch is padded, and the padding masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedplat import local_options, model
from fedplat.pytorch.training import algorithm, meaning, trainer
from fedplat.pytorch.training.examples import Batch, Indices, StepSchedule
from fedplat.pytorch.training.gradients import LocalTraining
from fedplat.pytorch.training.learner import Learner, Trainee
from fedplat.pytorch.vectorized import layout
from fedplat.pytorch.vectorized.layout import Base, ParameterLayout, Tensors, UnsuitableError
from fedplat.pytorch.vectorized.trainer import ClientAlgorithmState, FlatSgd, check_algorithm
from fedplat.pytorch.vectorized.vmap_gradients import Stack, StackedGradients

_MAX_CACHED_WEIGHTS = 1 << 21
"""Number of weights trained at once on a CPU: 8 MiB, which fit into its cache together with their gradients."""
_GPU_SHARE = 1 / 12
"""Fraction of a GPU's free memory for the weights; gradients, momentum and autograd's saved tensors also need
memory."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One client: its index in the list of trainings, and the examples of each step's batches."""

    index: int
    work: LocalTraining
    steps: list[list[Indices]]
    first_of_last_epoch: int


class CohortTrainer:
    """Trains clients of one model version together.

    Raises `UnsuitableError` for unsupported training: mixed precision, example-level privacy, modules with BatchNorm or
    other values that change in training, modules that draw random numbers, losses that are not a mean over examples.
    """

    def __init__(self, trainee: Trainee, options: local_options.LocalOptions) -> None:
        if options.precision != "fp32":
            raise UnsuitableError(f'precision = "{options.precision}"; expected "fp32"')
        if options.is_private:
            raise UnsuitableError(f'dp = "{options.dp}": Opacus clips gradients of one client at a time')
        check_algorithm(options)
        if trainee.has_batch_norm:
            raise UnsuitableError("BatchNorm keeps means over all batches, and batches are padded here")
        self.layout = ParameterLayout(trainee)
        if personal := sorted(trainee.personal & set(self.layout.state_names)):
            raise UnsuitableError(f"{personal[0]!r} is personal, but not a trained parameter")
        self._trainee, self._options = trainee, options
        self._half = algorithm.build_guarded_algorithm(options)
        self._gradients: StackedGradients | None = None
        self._weights = torch.empty(0, self.layout.size, device=trainee.device)

    def base(self, parameters: model.Parameters) -> Base:
        """Prepare a model for `train`; it has to fit the module."""
        return self.layout.base(parameters, self._half.needs_control)

    def at_once(self) -> int:
        """Return the best number of clients to train at the same time."""
        if self._trainee.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._trainee.device)
            return max(1, int(free * _GPU_SHARE) // (4 * self.layout.size))
        return max(1, _MAX_CACHED_WEIGHTS // self.layout.size)

    def train(self, base: Base, works: Sequence[LocalTraining]) -> list[tuple[model.Parameters, dict[str, float]]]:
        """Return the update and the metrics of each client; store their client states."""
        layout.refuse_server_tensors(base.parameters)
        befores = [trainer.measure_before(self._trainee, base.parameters, work) for work in works]
        rows = sorted((self._row(index, work) for index, work in enumerate(works)), key=lambda row: -len(row.steps))
        weights = self._load(base, rows)
        starts = [ClientAlgorithmState(self.layout, self._options, base, row.work.client_state) for row in rows]
        descent = FlatSgd(self.layout, self._options, works[0].learning_rate, weights)
        drift = self._drift(starts)
        descent.correct(starts[0].correction.pull, base.weights.to(weights.device), drift)
        self._trainee.hidden.restore()
        scores = self._run(base, descent, weights, rows)
        if self._trainee.hidden.is_changed():
            self._trainee.hidden.restore()
            raise UnsuitableError("the module remembers something of each client outside its state_dict")
        self._trainee.check_base_unchanged()
        results: list[tuple[model.Parameters, dict[str, float]]] = [(base.parameters, {})] * len(works)
        for row, start, trained, score in zip(rows, starts, weights.cpu(), scores, strict=True):
            update = self.layout.update(base, trained, {})
            metrics = start.end(trained, len(row.steps), row.work, update)
            self.layout.save(trained, {}, row.work.client_state)
            results[row.index] = update, {**score, **befores[row.index], **metrics}
        return results

    def _row(self, index: int, work: LocalTraining) -> _Row:
        plan = StepSchedule(
            num_examples=len(work.examples), options=self._options, seed=work.seed, fraction=work.fraction
        )
        steps = [plan.batches_of(step) for step in plan.steps()]
        return _Row(index, work, steps, (len(steps) - 1) // plan.steps_per_epoch * plan.steps_per_epoch)

    def _load(self, base: Base, rows: Sequence[_Row]) -> torch.Tensor:
        """Load the clients' weights, always into the same memory, so that recorded computations can be run again."""
        if len(rows) > len(self._weights):
            self._weights = torch.empty(len(rows), self.layout.size, device=self._trainee.device)
            self._gradients = None
        weights = self._weights[: len(rows)]
        weights[:, : self.layout.num_shared] = base.weights.to(weights.device)
        for row, own in zip(rows, weights, strict=True):
            self.layout.load_personal(own, row.work.client_state)
        return weights

    def _drift(self, starts: Sequence[ClientAlgorithmState]) -> torch.Tensor | None:
        drifts = [start.drift for start in starts]
        if all(drift is None for drift in drifts):
            return None
        zeros = torch.zeros(self.layout.num_shared)
        return torch.stack([zeros if drift is None else drift for drift in drifts]).to(self._trainee.device)

    def _run(self, base: Base, descent: FlatSgd, weights: torch.Tensor, rows: Sequence[_Row]) -> list[dict[str, float]]:
        if self._gradients is None:
            state = {name: value.to(weights.device) for name, value in base.state.items()}
            learner = self._trainee.learner
            self._gradients = StackedGradients(self._trainee.module, learner.batch_loss, self.layout.names, state)
        self._trainee.module.train()
        scores = _StackedScores(len(rows), weights.device, self._trainee.learner)
        number = 0
        while active := [row for row in rows if len(row.steps) > number]:
            views = self.layout.views(weights[: len(active)])
            descent.step(views, self._step(number, active, views, scores))
            number += 1
        return scores.means()

    def _step(self, number: int, active: Sequence[_Row], views: list[torch.Tensor], scores: _StackedScores) -> Tensors:
        """Return the gradients of one step of all clients that are still in training."""
        assert self._gradients is not None
        batches = [row.steps[number] for row in active]
        totals = np.array([sum(map(len, each)) for each in batches])
        in_last_epoch = np.array([number >= row.first_of_last_epoch for row in active])
        gradients: Tensors = ()
        for turn in range(max(map(len, batches))):
            chosen = [each[turn] if turn < len(each) else each[0][:0] for each in batches]
            sizes = np.array([len(indices) for indices in chosen])
            stack = self._stack(active, chosen, sizes)
            result = self._gradients(views, stack)
            scores.add(result.losses, result.outputs, stack.targets, sizes * in_last_epoch)
            if (sizes == totals).all():
                return result.gradients
            shares = torch.from_numpy((sizes / totals).astype(np.float32)).to(stack.inputs.device)
            scaled = [each * shares.view(-1, *[1] * (each.ndim - 1)) for each in result.gradients]
            gradients = layout.add_pairs(gradients, scaled) if gradients else scaled
        return gradients

    def _stack(self, rows: Sequence[_Row], chosen: Sequence[Indices], sizes: npt.NDArray[np.int64]) -> Stack:
        """Return one batch of each client, padded to the longest with its client's first example."""
        longest = int(sizes.max())
        is_full = bool((sizes == longest).all())
        table = np.empty((len(rows), longest), np.int64)
        for line, row, batch in zip(table, rows, chosen, strict=True):
            examples = _examples(row.work)
            line[: len(batch)] = examples.part[batch]
            line[len(batch) :] = examples.part[0]
        examples = _examples(rows[0].work)
        indices = torch.from_numpy(table.reshape(-1)).to(examples.inputs.device)
        inputs = examples.inputs.index_select(0, indices).unflatten(0, table.shape)
        targets = examples.targets.index_select(0, indices).unflatten(0, table.shape)
        return Stack(inputs, targets, None if is_full else torch.from_numpy(sizes).to(inputs.device))


class _StackedScores:
    """Sums over each client's last epoch; they stay on the device until they are read."""

    def __init__(self, num_clients: int, device: torch.device, learner: Learner) -> None:
        self._count, self._class_weights = learner.count_answers, learner.class_weights
        self._losses = torch.zeros(num_clients, dtype=torch.float64, device=device)
        self._hits = torch.zeros(num_clients, dtype=torch.int64, device=device)
        self._answers = torch.zeros(num_clients, dtype=torch.int64, device=device)
        self._weights = torch.zeros(num_clients, dtype=torch.float64, device=device)

    def add(
        self, losses: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor, sizes: npt.NDArray[np.int64]
    ) -> None:
        """Add batches of the first clients; `sizes` are the numbers of examples to count."""
        if not sizes.any():
            return
        count = len(losses)
        counted = torch.from_numpy(sizes).to(losses.device)
        weights = self._weigh(targets, counted)
        self._weights[:count] += weights
        self._losses[:count] += (losses * weights).where(weights > 0, 0.0)
        if isinstance(self._count, meaning.CountClasses):
            if self._count.suits(outputs[0], targets[0]):
                mask = torch.arange(targets.shape[1], device=counted.device) < counted.unsqueeze(1)
                answers = targets != self._count.ignored
                hits = (outputs.argmax(2) == targets) & answers
                for total, found in ((self._hits, hits), (self._answers, answers)):
                    total[:count] += (found.reshape(*targets.shape[:2], -1).sum(2) * mask).sum(1)
        elif self._count is not None:
            for row, size in enumerate(sizes.tolist()):
                if not size:
                    continue
                hits, answers = self._count(outputs[row, :size], targets[row, :size])
                self._hits[row] += hits
                self._answers[row] += answers

    def _weigh(self, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Return the weight of each client's loss."""
        weights = None if self._class_weights is None else self._class_weights(targets)
        if weights is None:
            return counted
        rows = weights.reshape(*targets.shape[:2], -1).sum(2)
        return (rows * (torch.arange(targets.shape[1], device=counted.device) < counted.unsqueeze(1))).sum(1)

    def means(self) -> list[dict[str, float]]:
        """Return `loss`, and `accuracy` if there are answers, of each client."""
        pairs = zip(self._losses.tolist(), self._weights.tolist(), strict=True)
        means = [{"loss": loss / weight} if weight else {} for loss, weight in pairs]
        for each, hits, answers in zip(means, self._hits.tolist(), self._answers.tolist(), strict=True):
            if answers:
                each["accuracy"] = hits / answers
        return means


def _examples(work: LocalTraining) -> PartExamples:
    assert isinstance(work.examples, PartExamples)
    return work.examples


_BLOCK_ENTRIES = 1 << 22
"""Input entries gathered in one call: 16 MiB, which takes far fewer calls than one for each batch."""


@dataclass(frozen=True, slots=True)
class PartExamples:
    """The examples of `inputs` and `targets` at the indices `part`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    part: Indices

    def __len__(self) -> int:
        return len(self.part)

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Yield inputs and targets of each batch in `order`, which contains indices of `part`."""
        for block in self._blocks(order):
            sizes = [len(indices) for indices in block]
            chosen = torch.from_numpy(self.part[np.concatenate(block)]).to(self.inputs.device)
            inputs, targets = self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)
            yield from zip(inputs.split(sizes), targets.split(sizes), strict=True)

    def _blocks(self, order: Iterable[Indices]) -> Iterator[list[Indices]]:
        most = max(1, _BLOCK_ENTRIES // max(1, self.inputs[0].numel()))
        block: list[Indices] = []
        size = 0
        for indices in order:
            if block and size + len(indices) > most:
                yield block
                block, size = [], 0
            block.append(indices)
            size += len(indices)
        if block:
            yield block
