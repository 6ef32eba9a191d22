"""The local algorithms that a layout of ranks can carry out."""

from __future__ import annotations

from collections.abc import Iterator

from fedplat.aggregate.local import LocalAlgorithm
from fedplat.local_options import LocalOptions


def refuse_algorithm(options: LocalOptions, algorithm: LocalAlgorithm) -> None:
    """Raise `ValueError` if a local algorithm needs whole tensors, which no rank of a layout has.

    Those without control variates, own loss, gradients at other weights, client state and additions to the update
    work: each of their steps uses the gradient, the weights and the initial weights of one entry at a time.
    """
    for reason in _reasons(options, algorithm):
        raise ValueError(
            f'algorithm = "{options.algorithm_name}": it {reason}, which is not possible with a model that several '
            'ranks divide; expected an algorithm such as "sgd" or "fedprox", or a trainer without parallel'
        )


def _reasons(options: LocalOptions, algorithm: LocalAlgorithm) -> Iterator[str]:
    if options.is_private:
        yield f'clips the gradient of each example (dp = "{options.dp}")'
    if algorithm.needs_control:
        yield "has control variates"
    if algorithm.make_loss is not None:
        yield "has its own loss"
    if algorithm.perturb is not None:
        yield "uses gradients at other weights"
    if options.keep_optimizer:
        yield "keeps the state of its optimizer (keep_optimizer = true)"
    if options.build_algorithm().end is not LocalAlgorithm().end:
        yield "has client state, or adds to the update"
