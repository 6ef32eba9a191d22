"""Server optimizers: they turn the aggregated update of a round into the model's step, and keep state between rounds.

Source: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 1 (FedOpt): the mean update
takes the place of a negative gradient, and ServerOpt is any first-order method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fedplat.aggregate.algebra import Partial, Rule, State, Wrapper
from fedplat.model import Vector


def server_optimizer(init: Callable[[int], State], update: Callable[[State, Vector], tuple[Vector, State]]) -> Wrapper:
    """Wrap a rule so that `update(state, delta)` computes the step; `delta` is the wrapped rule's step.

    `init(size)` creates the optimizer's own named vectors, each of shape [size]; `update` receives and returns only
    these, and must not modify its arguments. Optimizers can be nested if their names differ, else `init` raises
    `ValueError`.
    """
    names = frozenset(init(0))

    def wrap(inner: Rule) -> Rule:
        def init_all(size: int) -> State:
            below = inner.init(size)
            if twice := names & below.keys():
                raise ValueError(f"two nested optimizers both have the state {min(twice)!r}; nest different ones")
            return {**below, **init(size)}

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            own = {name: vector for name, vector in state.items() if name in names}
            below = {name: vector for name, vector in state.items() if name not in names}
            delta, below = inner.apply(below, partial)
            step, own = update(own, delta)
            return step, {**below, **own}

        return dataclasses.replace(inner, init=init_all, apply=apply)

    return wrap
