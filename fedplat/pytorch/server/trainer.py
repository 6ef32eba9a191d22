"""The trainer that an operator registers for the server's own data, its layout of ranks, and the evaluation with it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from fedplat import client_state, errors, texts
from fedplat.config.decoding import prepare_type
from fedplat.job.tables import ServerLearning
from fedplat.local_options import NO_PINS, Pins
from fedplat.metrics import Metric
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch import distributed, training
from fedplat.pytorch.parallel import ParallelPlan, ParallelTrainee, evaluate_parts
from fedplat.pytorch.parallel.apply import Layout, make_layout, make_mesh
from fedplat.pytorch.parallel.parts import sum_scores
from fedplat.pytorch.training import Examples, Sums, Trainee, evaluate_batches, iterate_batches
from fedplat.pytorch.training.tokenizers import check_tokenizer

Data: TypeAlias = Dataset[Any] | Callable[[], Dataset[Any]]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter], ServerLearning], torch.optim.Optimizer]
Made = TypeVar("Made")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerTrainer:
    """A module and the server's own examples; ordinary PyTorch, like a client's `TorchTrainer`.

    ```python
    trainer = ServerTrainer(model=make_model, data=public_dataset, evaluation=held_out)
    ```

    Each rank calls the functions itself, when it trains or evaluates and not before.
    """

    model: Callable[[], nn.Module]
    """Creates the module; the job's values replace its initial ones."""
    data: Data
    """A map-style dataset of (input, target) pairs, or a function that creates one; the same on every rank."""
    loss: training.Loss = nn.functional.cross_entropy
    """Mean loss of a batch of (output, target)."""
    evaluation: Data | None = None
    """Held-out examples, for `evaluate`."""
    share: training.Share = "all"
    """With "trained" the model has only what training changes, see `fedplat.pytorch.training.Learner`; jobs state the
    SHA-256 of all other tensors, which each rank has itself. Not with `[pool.parallel]`."""
    tokenizer: Any = None
    """The tokenizer of the data of a language model, whose digest (`fedplat.pytorch.huggingface.tokenizer_sha256`) jobs
    then state in their `[config]`; the same on every rank."""
    optimizer: MakeOptimizer | None = None
    """Creates an optimizer to replace SGD, from the parameters and the job's table; its learning rates are scaled. In a
    layout the parameters are this rank's own, mostly `DTensor`s, and its state has to have their shapes."""
    metrics: tuple[Metric, ...] = ()
    """Metrics of evaluations, such as `fedplat.metrics.F1()`, besides `loss` and `accuracy`."""
    accuracy: training.Accuracy = "auto"
    """Which answers are correct, see `fedplat.pytorch.training.Learner`."""
    plan: ParallelPlan | None = None
    """The parts of the module that ranks divide, for jobs with `[pool.parallel]`; by default that of the module itself,
    if it is one of Hugging Face's."""

    @property
    def learner(self) -> training.Learner:
        """The module, the loss and the metrics."""
        return training.Learner(
            model=self.model, loss=self.loss, share=self.share, metrics=self.metrics, accuracy=self.accuracy
        )


def load_examples(data: Data, device: torch.device) -> training.Examples:
    """Return the examples of a trainer's data. Raises `ValueError` if it has no length or is empty."""
    given: Any = data
    return training.check_examples(given() if training.as_dataset(given) is None else given, device)


def make_on_all_ranks(ranks: distributed.Ranks, make: Callable[[], Made], what: str = "the trainer") -> Made:
    """Call `make` on every rank and return its result; if it fails on any rank, raise `TrainingError` on all.

    So a failure of the operator's code, or of a disk, on one rank leaves no other rank waiting. `what` names the result
    in errors.
    """
    made: list[Made] = []
    text = ""
    try:
        made.append(make())
    except Exception as exc:
        _logger.exception("On this rank %s cannot be used.", what)
        text = texts.repair(str(exc)) if isinstance(exc, ValueError) else texts.describe(exc)
    for rank, error in enumerate(ranks.all_gather(text.encode())):
        if error:
            raise errors.TrainingError(f"{what} cannot be used on rank {rank}: {error.decode()}")
    return made[0]


def find_layout(ranks: distributed.Ranks, parallel: Parallel) -> Layout | None:
    """Return this process's place in a layout of the first ranks; None in a process that is not among them.

    All ranks of `join_group` have to call it. A layout for more ranks than there are has no mesh: each process then has
    the whole model, and computes parts of batches, or stages, one after the other. Layouts are made once, since each
    has its own groups of processes.
    """
    known: dict[object, Layout | None] = ranks.kept
    if parallel not in known:
        known[parallel] = _make_layout(ranks, parallel)
    return known[parallel]


def _make_layout(ranks: distributed.Ranks, parallel: Parallel) -> Layout | None:
    if ranks.size < parallel.num_ranks:
        group = ranks.subgroup(min(ranks.size, parallel.num_parts))
        # A process with the whole model has nothing to fetch from elsewhere, and no reason to compute things again.
        alone = msgspec.structs.replace(parallel, offload="none", recompute="none")
        return None if group is None else Layout(alone, group, None)
    group = ranks.subgroup(parallel.num_ranks)
    if group is None:
        make_mesh(ranks, parallel)  # its groups need all processes, also those that are in none of them
        return None
    layout = make_layout(group, parallel)
    assert layout.mesh is not None
    for number, size in enumerate(layout.mesh.shape):
        if size > 1:
            group.prove(layout.mesh.get_group(number))
    return layout


_BATCH_SIZE = 256


def evaluate(
    ranks: distributed.Ranks,
    trainer: ServerTrainer,
    parameters: Parameters,
    batch_size: int = _BATCH_SIZE,
    parallel: Parallel | None = None,
    pins: Pins = NO_PINS,
) -> dict[str, float]:
    """Return `loss`, `accuracy` for classification, and the trainer's metrics of a model on its held-out examples.

    Every rank calls it with the same arguments, computes every n-th batch of n ranks, and gets the result. With
    `parallel` and enough ranks, they divide the model instead, and those that are too many get an empty result. `pins`
    are the digests that the job states. Raises `TrainingError` on all of them alike.
    """
    if parallel is not None and ranks.size >= parallel.num_ranks:
        layout = find_layout(ranks, parallel)
        return {} if layout is None else _evaluate_in_layout(layout, trainer, parameters, batch_size, pins)

    def build() -> tuple[Trainee, Examples]:
        check_tokenizer(trainer.tokenizer, pins.tokenizer_sha256)
        trainee = Trainee(trainer.learner, ranks.device)
        training.check_base(trainee.base, pins.base_sha256, is_required=True)
        trainee.load(parameters, client_state.ClientState())
        return trainee, _load_held_out(trainer, ranks)

    trainee, examples = make_on_all_ranks(ranks, build)
    order = itertools.islice(iterate_batches(len(examples), batch_size), ranks.rank, None, ranks.size)
    return sum_scores(ranks, evaluate_batches(trainee, examples, order)).means(trainer.metrics)


def _evaluate_in_layout(
    layout: Layout, trainer: ServerTrainer, parameters: Parameters, batch_size: int, pins: Pins
) -> dict[str, float]:
    ranks = layout.ranks

    def build() -> tuple[ParallelTrainee, Examples]:
        check_tokenizer(trainer.tokenizer, pins.tokenizer_sha256)
        trainee = divide_module(trainer, layout)
        trainee.load(parameters, client_state.ClientState())
        return trainee, _load_held_out(trainer, ranks)

    trainee, examples = make_on_all_ranks(ranks, build)
    sums = evaluate_parts(trainee, examples, batch_size).sums()
    mine = msgspec.msgpack.encode(sums) if sums.num_examples else b""  # not every rank computes a loss
    parts = [msgspec.msgpack.decode(each, type=prepare_type(Sums)) for each in ranks.all_gather(mine) if each]
    return Sums.total(parts).means(trainer.metrics)


def divide_module(
    trainer: ServerTrainer, layout: Layout, precision: Literal["fp32", "bf16", "fp16"] = "fp32", seed: int = 0
) -> ParallelTrainee:
    """Return this rank's part of a trainer's module. Raises `ValueError` if only a part of it is in the model."""
    if trainer.share != "all":
        raise ValueError(
            f'a layout divides all tensors of a module, so it cannot train with share = "{trainer.share}"; expected a '
            "job without [pool.parallel]"
        )
    return ParallelTrainee(trainer.learner, layout, trainer.plan, precision, seed)


def _load_held_out(trainer: ServerTrainer, ranks: distributed.Ranks) -> Examples:
    if trainer.evaluation is None:
        raise ValueError("no examples to evaluate on; expected ServerTrainer(evaluation=...)")
    return load_examples(trainer.evaluation, ranks.device)
