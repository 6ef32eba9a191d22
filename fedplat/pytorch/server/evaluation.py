"""Evaluation of a model on the server's own held-out examples."""

from __future__ import annotations

import itertools

import msgspec

from fedplat.client_state import ClientState
from fedplat.config.decoding import prepare_type
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import Layout, ParallelTrainee, evaluate_parts
from fedplat.pytorch.parallel.scores import sum_scores
from fedplat.pytorch.server.layouts import find_layout
from fedplat.pytorch.server.trainer import ServerTrainer, load_examples, make_on_all_ranks
from fedplat.pytorch.training import Examples, Sums, Trainee, evaluate_batches, iterate_batches

_BATCH_SIZE = 256


def evaluate(
    ranks: Ranks,
    trainer: ServerTrainer,
    parameters: Parameters,
    batch_size: int = _BATCH_SIZE,
    parallel: Parallel | None = None,
) -> dict[str, float]:
    """Return `loss`, `accuracy` for classification, and the trainer's metrics of a model on its held-out examples.

    Every rank calls it with the same arguments, computes every n-th batch of n ranks, and gets the result. With
    `parallel` and enough ranks, they divide the model instead, and those that are too many get an empty result. Raises
    `TrainingError` on all of them alike.
    """
    if parallel is not None and ranks.size >= parallel.num_ranks:
        layout = find_layout(ranks, parallel)
        return {} if layout is None else _evaluate_in_layout(layout, trainer, parameters, batch_size)

    def build() -> tuple[Trainee, Examples]:
        trainee = Trainee(trainer.learner, ranks.device)
        trainee.load(parameters, ClientState())
        return trainee, _load_held_out(trainer, ranks)

    trainee, examples = make_on_all_ranks(ranks, build)
    order = itertools.islice(iterate_batches(len(examples), batch_size), ranks.rank, None, ranks.size)
    return sum_scores(ranks, evaluate_batches(trainee, examples, order)).means(trainer.metrics)


def _evaluate_in_layout(
    layout: Layout, trainer: ServerTrainer, parameters: Parameters, batch_size: int
) -> dict[str, float]:
    ranks = layout.ranks

    def build() -> tuple[ParallelTrainee, Examples]:
        trainee = ParallelTrainee(trainer.learner, layout, trainer.plan)
        trainee.load(parameters, ClientState())
        return trainee, _load_held_out(trainer, ranks)

    trainee, examples = make_on_all_ranks(ranks, build)
    sums = evaluate_parts(trainee, examples, batch_size).sums()
    mine = msgspec.msgpack.encode(sums) if sums.num_examples else b""  # not every rank computes a loss
    parts = [msgspec.msgpack.decode(each, type=prepare_type(Sums)) for each in ranks.all_gather(mine) if each]
    return Sums.total(parts).means(trainer.metrics)


def _load_held_out(trainer: ServerTrainer, ranks: Ranks) -> Examples:
    if trainer.evaluation is None:
        raise ValueError("no examples to evaluate on; expected ServerTrainer(evaluation=...)")
    return load_examples(trainer.evaluation, ranks.device)
