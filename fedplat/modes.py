"""Training modes: synchronous rounds, full buffers of updates, clients in bounded lockstep, or one after the other.

Buffered asynchronous training is FedBuff: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous
Aggregation", arXiv 2106.06639, Algorithm 1. The weight of an update decreases with the number of versions committed
since the version that its client started from. The weights s(τ) are those of Xie et al. 2019, "Asynchronous Federated
Optimization", arXiv 1903.03934, section 5.2; FedBuff's is the polynomial one with a = 1/2.

Stale synchronous parallel training is that of Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013, section 3.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Protocol, cast, runtime_checkable

from msgspec import Meta, Struct
from msgspec.structs import replace

from fedplat.config import user_code
from fedplat.config.plugins import AbsentPlugin, Kind, by_name, define, is_builtin, name_of
from fedplat.errors import PluginError

Exponent = Annotated[float, Meta(ge=0.0, le=100.0)]
Slope = Annotated[float, Meta(gt=0.0, le=1e6)]
Versions = Annotated[int, Meta(ge=0, le=1_000_000)]
MAX_OF_PLUGIN = 10_000
"""Largest `max_staleness` with a staleness weight of a plugin."""


@runtime_checkable
class StalenessWeight(Protocol):
    """The key `mode.staleness` of a job file: the options of a weight, selected by the key `kind`, or only its name."""

    def weight(self, staleness: int) -> float:
        """Return the factor of an update's weight, finite and at least 0, for a base version that many versions old."""
        ...


class PolynomialStaleness(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="polynomial"):
    """(1 + τ)^-`exponent`; 1/√(1 + τ) by default, as in FedBuff."""

    exponent: Exponent = 0.5
    """a: with a larger one, stale updates count less."""

    def weight(self, staleness: int) -> float:
        """Return the factor."""
        return (1.0 + staleness) ** -self.exponent


class ConstantStaleness(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """1 for all updates."""

    def weight(self, staleness: int) -> float:
        """Return the factor."""
        return 1.0


class HingeStaleness(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hinge"):
    """1 up to τ = `grace`, then 1 / (`slope` (τ - `grace`) + 1)."""

    slope: Slope = 10.0
    """a: with a larger one, stale updates count less."""
    grace: Versions = 4
    """b, the largest staleness of updates that count in full."""

    def weight(self, staleness: int) -> float:
        """Return the factor."""
        beyond = staleness - self.grace
        return 1.0 if beyond <= 0 else 1.0 / (self.slope * beyond + 1.0)


STALENESS_WEIGHTS: Mapping[str, type[StalenessWeight]] = by_name(PolynomialStaleness, ConstantStaleness, HingeStaleness)
"""The options record of each built-in weight, by its name in a job file."""

define(Kind("staleness", "kind", "a staleness weight", StalenessWeight, ("weight",), STALENESS_WEIGHTS, plain=True))


def compute_weight(options: StalenessWeight, staleness: int) -> float:
    """Return the weight of a plugin.

    Raises `PluginError` or `UserCodeError` unless it is a finite number of at least 0.
    """
    name = f'mode.staleness = "{name_of(options)}": weight({staleness})'
    with user_code.wrap_errors(name):
        found: object = options.weight(staleness)
    if not isinstance(found, numbers.Real) or not 0.0 <= float(found) < math.inf:
        raise PluginError(f"{name} returned {str(found)[:100]}; expected a finite number of at least 0")
    return float(found)


class Sync(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sync"):
    """Synchronous rounds: a cohort starts from one version, and its updates make the next."""

    def weight(self, staleness: int) -> float:
        """Return the weight of an update: 1, because no update is stale."""
        return 1.0


class Buffered(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="buffered", dict=True):
    """Buffered asynchronous training: clients train continuously, each from the version that is then the latest.

    `selection.goal` updates fill the buffer and make a version. The staleness τ of an update is the number of versions
    committed since its client started.

    >>> [Buffered(concurrency=1).weight(tau) for tau in (0, 3)]
    [1.0, 0.5]
    """

    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Number of clients that train at the same time."""
    max_staleness: Versions | None = None
    """Largest accepted staleness: a client with an older base version is stopped (`TOO_STALE`); unset: no limit."""
    staleness: StalenessWeight = PolynomialStaleness()
    """Factor of an update's weight: a name, or a table with its options, such as `{ kind = "hinge", slope = 2.0 }`.
    `"polynomial"`: (1 + τ)^-`exponent`; `"constant"`: 1; `"hinge"`: 1 up to τ = `grace`, then 1 / (`slope` (τ -
    `grace`) + 1)."""
    exponent: Exponent | None = None
    """Only with `staleness = "polynomial"`; unset: 0.5, FedBuff's 1/√(1 + τ)."""
    slope: Slope | None = None
    """Only with `staleness = "hinge"`; unset: 10."""
    grace: Versions | None = None
    """Only with `staleness = "hinge"`; unset: 4."""

    def __post_init__(self) -> None:
        for name, owner in (("exponent", PolynomialStaleness), ("slope", HingeStaleness), ("grace", HingeStaleness)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(self.staleness, owner):
                raise ValueError(
                    f'{name} = {value}: expected with staleness = "{name_of(owner())}" only, '
                    f'and it is "{name_of(self.staleness)}"'
                )
            if self.staleness != owner():
                raise ValueError(f"{name} = {value}: [mode.staleness] has options; expected {name} in it, too")
        self._check_plugin()

    def weight(self, staleness: int) -> float:
        """Return the weight of an update with a base version that is `staleness` versions old; 1 for a fresh one.

        Raises `PluginError` or `UserCodeError` if the weight of a plugin is not a finite number of at least 0.
        """
        if is_builtin(self.staleness, StalenessWeight):
            return self._weight().weight(staleness)
        if staleness < len(self._weights):
            return self._weights[staleness]
        return compute_weight(self.staleness, staleness)  # beyond `max_staleness`: no update has it

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        """The weights of a plugin, whose code does not run again: it may fail at any call."""
        assert self.max_staleness is not None
        return tuple(compute_weight(self.staleness, staleness) for staleness in range(self.max_staleness + 1))

    def _check_plugin(self) -> None:
        """Compute all weights of a plugin, so that one that fails does so before the job begins."""
        if is_builtin(self.staleness, StalenessWeight) or isinstance(self.staleness, AbsentPlugin):
            return
        if self.max_staleness is None or self.max_staleness > MAX_OF_PLUGIN:
            raise ValueError(
                f"max_staleness = {self.max_staleness or 'none'}: expected at most {MAX_OF_PLUGIN} with the staleness "
                "weight of a plugin, whose weights are all computed before the job begins"
            )
        _ = self._weights

    def _weight(self) -> StalenessWeight:
        """Return the built-in weight with the options beside `staleness`."""
        given = {name: getattr(self, name) for name in ("exponent", "slope", "grace")}
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(cast(Any, self.staleness), **changes) if changes else self.staleness

    def is_too_stale(self, staleness: int) -> bool:
        """Return whether an update of this staleness is refused."""
        return self.max_staleness is not None and staleness > self.max_staleness


class StaleSynchronous(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ssp"):
    """Stale synchronous parallel training: each update makes a version, and no client gets far ahead of the slowest.

    The clock of a client is the number of its updates in versions. A client at clock c begins its next training only if
    the slowest is at c - `slack` or later. Updates count in full, because the slack bounds their age already.

    >>> mode = StaleSynchronous(concurrency=2, slack=1)
    >>> mode.may_begin(4, 3), mode.may_begin(5, 3)
    (True, False)
    """

    concurrency: Annotated[int, Meta(ge=1, le=1000)]
    """Largest number of clients in the clock set, which train at the same time."""
    slack: Annotated[int, Meta(ge=0, le=1_000_000)]
    """s: a client begins only if it is at most s clocks ahead of the slowest; 0: bulk synchronous."""

    @property
    def max_staleness(self) -> None:
        """The largest accepted staleness in versions: no limit, because the slack is one in clocks."""
        return

    def weight(self, staleness: int) -> float:
        """Return the factor of an update's weight: 1."""
        return 1.0

    def is_too_stale(self, staleness: int) -> bool:
        """Return whether an update of this staleness is refused: never."""
        return False

    def may_begin(self, clock: int, minimum: int) -> bool:
        """Return whether a client at `clock` may train while the slowest is at `minimum`."""
        return clock - minimum <= self.slack


class Cyclic(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cyclic"):
    """Cyclic weight transfer: the model goes from client to client, and each trains it and passes it on.

    Chang et al. 2018, JAMIA 25(8). A round is the turn of one client. The version that it makes is the model that the
    next one gets, so after a turn that fails another client continues from the same version.
    """

    clients: Annotated[int, Meta(ge=2, le=10_000)]
    """Number of clients in a cycle: each has one turn in it."""

    def weight(self, staleness: int) -> float:
        """Return the weight of an update: 1, because no update is stale."""
        return 1.0
