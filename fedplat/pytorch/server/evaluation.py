"""Evaluation of a model on the server's own held-out examples."""

from __future__ import annotations

import itertools

from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server.data_parallel import sum_scores
from fedplat.pytorch.server.trainer import ServerTrainer, load_examples, make_on_all_ranks
from fedplat.pytorch.training import Examples, Trainee, evaluate_batches, iterate_batches

_BATCH_SIZE = 256


def evaluate(
    ranks: Ranks, trainer: ServerTrainer, parameters: Parameters, batch_size: int = _BATCH_SIZE
) -> dict[str, float]:
    """Return `loss`, `accuracy` for classification, and the trainer's metrics of a model on its held-out examples.

    Every rank calls it with the same arguments, computes every n-th batch of n ranks, and gets the result. Raises
    `TrainingError` on all of them alike.
    """

    def build() -> tuple[Trainee, Examples]:
        if trainer.evaluation is None:
            raise ValueError("no examples to evaluate on; expected ServerTrainer(evaluation=...)")
        trainee = Trainee(trainer.learner, ranks.device)
        trainee.load(parameters, ClientState())
        return trainee, load_examples(trainer.evaluation, ranks.device)

    trainee, examples = make_on_all_ranks(ranks, build)
    order = itertools.islice(iterate_batches(len(examples), batch_size), ranks.rank, None, ranks.size)
    return sum_scores(ranks, evaluate_batches(trainee, examples, order)).means(trainer.metrics)
