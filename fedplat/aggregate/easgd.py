"""Elastic averaging SGD (EASGD, EAMSGD): clients keep their own models, which elastic forces tie to a common centre.

Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv 1412.6651, Section 3 and
Algorithms 1 (asynchronous EASGD) and 2 (EAMSGD, Nesterov's momentum δ). With the centre x̃, a client's own model x_i,
the learning rate η and α = η · rho, a client does this every τ steps:

    x ← x_i;   x_i ← x_i - α (x - x̃);   x̃ ← x̃ + α (x - x̃)

and in each step x_i ← x_i - η g(x), or with momentum v ← δ v - η g(x + δ v), x_i ← x_i + v. So the first gradient after
an exchange is that at the weights before it, as in both algorithms.

The server's model is x̃. A client reports e = α (x_i - x̃) as its update, against the version that it received, and then
makes its τ steps. The server adds the sum of the differences e, not their mean. With p reports a round, all against the
latest version, this is the synchronous form with the moving rate β = p α; with `goal = 1` the clients take turns, and
in the buffered mode with `goal = 1` it is the asynchronous form.

A client's x_i is its client state. It takes effect only if the server has merged e, so both halves of an exchange count
or neither, and exchanges keep x̃ + Σ x_i unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import msgspec

from fedplat.aggregate import local
from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, ClientRequirements, Partial, Rule, State
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import FLOATING, Schema, Vector

NAME = "easgd"


class Easgd(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=NAME):
    """The server's half of elastic averaging: the centre moves by the sum of the clients' elastic differences."""

    def build(self) -> Rule:
        """Return the rule."""
        return server_easgd()


class LocalEasgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag=NAME):
    """Options of the client's half of elastic averaging. Raises `ValueError` for a value out of range."""

    rho: ranges.Rate
    """The strength of the elastic force; a client moves `learning_rate * rho` of its way to the centre."""
    tau: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 0
    """τ, the local steps after each exchange; 0 for those of `epochs`."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> local.LocalAlgorithm:
        """Return the algorithm with these options."""
        return client_easgd(self.rho)


def server_easgd() -> Rule:
    """Return the rule with the step Σ weight · e; the weights of its jobs are 1.

    `apply` raises `ValueError` like that of `weighted_mean`.
    """
    mean = weighted_mean()

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean.apply({}, dataclasses.replace(partial, total=partial.total[:0]))  # for its checks
        return partial.total.copy(), state

    return dataclasses.replace(
        mean, apply=apply, unit_weights=True, requirements=ClientRequirements(NAME, misfit=_misfit)
    )


def client_easgd(rho: float) -> local.LocalAlgorithm:
    """Return the client's half; the client state is x_i, initially the centre, and the optimizer's state.

    It reports the metric `centre_distance`, ‖x_i - x̃‖ over the trained weights before the exchange.
    """

    def start(context: local.StartContext) -> local.LocalStart:
        own = {name: context.remembered.get(name, centre) for name, centre in context.received.items()}
        apart = {name: own[name] - centre for name, centre in context.received.items()}
        alpha = context.learning_rate * rho
        distance = math.sqrt(sum(_squares(apart[name]) for name in context.trained))
        return local.LocalStart(
            weights=own,
            exchange={name: alpha * difference for name, difference in apart.items()},
            metrics={"centre_distance": distance},
        )

    def end(
        correction: local.Correction, remembered: local.Arrays, direction: local.UpdateDirection
    ) -> local.LocalEnding:
        return local.LocalEnding(remember=direction.weights)

    return local.LocalAlgorithm(end=end, start=start, nesterov=True, keeps_optimizer=True)


def _misfit(schema: Schema) -> str:
    """Return why a model does not fit the rule, or ""."""
    for tensor in schema.tensors:
        if tensor.dtype in FLOATING and tensor.dtype not in ("F32", "F64"):
            return (
                f"the rule {NAME} needs a model of F32 or F64 tensors, so that a client loses what the centre gains, "
                f"and tensor {tensor.name!r} is {tensor.dtype}"
            )
    return ""


def _squares(array: Any) -> float:
    return float((array * array).sum())
