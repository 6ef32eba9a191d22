"""What the server holds for one open attempt; its size does not depend on the number of updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.aggregate.algebra import Rule, State
from fedplat.errors import ModelError
from fedplat.model import DTYPES, FLOATING, Parameters, Schema, Segment, Values, Vector, blocks


class Accumulator:
    """Folds updates of one schema as they arrive and ends the attempt with the next model version.

    Floating-point entries go through the rule. Other entries are carried as the schema says: "keep" leaves
    the base version's value, "max" takes the largest value of the folded updates, entry by entry (for
    booleans: true if one was true). Memory is one float32 vector and the carried entries; it does not grow
    with the updates.

    >>> base = Parameters.from_arrays({"weight": np.zeros(2, np.float32)})
    >>> rule = weighted_mean()
    >>> accumulator = Accumulator(base.schema, rule)
    >>> accumulator.fold(Parameters.from_arrays({"weight": np.array([1, 3], np.float32)}), weight=10)
    >>> model, state = accumulator.finish(base, rule.init(base.schema.num_floating))
    >>> model["weight"]
    array([1., 3.], dtype=float32)
    """

    def __init__(self, schema: Schema, rule: Rule) -> None:
        self._schema = schema
        self._rule = rule
        self._partial = rule.start(schema.num_floating)
        self._carried: dict[Segment, npt.NDArray[Any]] = {}

    @property
    def num_updates(self) -> int:
        """Number of updates folded so far."""
        return self._partial.num_updates

    @property
    def total_weight(self) -> float:
        """Sum of their weights."""
        return self._partial.weight

    def fold(self, update: Values, weight: float) -> None:
        """Adds one update (a difference from the base version, see `Parameters.minus`), reading it in blocks.

        Raises `ModelError` when its schema is another, `ValueError` when the rule refuses it; nothing is
        added then. After any other error, from reading the update say, the accumulator is of no use any more.
        """
        self._check(update, "update")
        self._partial = self._rule.fold(self._partial, update.to_blocks(), weight)
        if self._schema.carry == "max":
            self._carry_largest(update)

    def finish(self, base: Parameters, state: State) -> tuple[Parameters, State]:
        """The next model version and the rule's next state; changes neither argument, and may be repeated.

        Raises `ModelError` when the schema of `base` is another, `ValueError` when the rule has no result,
        since no update was folded, say.
        """
        self._check(base, "base version")
        step, next_state = self._rule.apply(state, self._partial)
        model = base.plus(step)
        for run, largest in self._carried.items():
            model.segment(run)[...] = largest
        return model, next_state

    def _carry_largest(self, update: Values) -> None:
        for run in self._schema.segments:
            if run.dtype in FLOATING:
                continue
            largest = self._carried.get(run)
            if largest is None:
                largest = self._carried[run] = np.empty(run.count, DTYPES[run.dtype])
                for block, values in zip(blocks(run.count), update.carried(run), strict=True):
                    largest[block] = values
            else:
                for block, values in zip(blocks(run.count), update.carried(run), strict=True):
                    np.maximum(largest[block], values, out=largest[block])

    def _check(self, values: Values, what: str) -> None:
        if difference := values.schema.difference_from(self._schema):
            raise ModelError(f"the {what} does not fit the attempt: {difference}")


def state_to_bytes(state: State) -> bytes:
    """A rule's state as a safetensors file; nothing remembered is no bytes."""
    return Parameters.from_arrays(state).to_bytes() if state else b""


def state_from_bytes(data: bytes) -> State:
    """The state that `state_to_bytes` wrote, bit for bit; read-only. Raises `ModelError` when it is none."""
    if not data:
        return {}
    parameters = Parameters.from_bytes(data)
    state: dict[str, Vector] = {}
    for name, vector in parameters.items():
        if vector.dtype != np.float32 or vector.ndim != 1:
            raise ModelError(
                f"the remembered {name!r} is {vector.dtype} {list(vector.shape)}; expected a float32 vector"
            )
        state[name] = vector
    return state
