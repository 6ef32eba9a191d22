"""What the server may keep and show of the clients of a job, and of its noise: for all attempts of the job alike.

It is no matter of the protocol of its training: the clients of a private job are also protected in its evaluations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.job import JobSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Disclosure:
    """The limits of a job; the defaults are those of jobs without `[privacy]`.

    `shows_clients`: the numbers and failures of single clients may be shown. `shows_cohorts`: so may who takes part and
    how many do; otherwise the privacy guarantee depends on hiding it. `keeps_states`: the states of the optimizer of
    earlier versions may be kept; those of a private job may hold seeds of its noise. `named_metrics`: the metrics of a
    client that may be stored with its name (None: all). `is_charged`: its versions are releases with noise, each of
    which is charged to its privacy budget.
    """

    shows_clients: bool = True
    shows_cohorts: bool = True
    keeps_states: bool = True
    named_metrics: frozenset[str] | None = None
    is_charged: bool = False

    def kept_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a client that may be stored with its name; of a private job, those to be noised."""
        named = self.named_metrics
        return {name: value for name, value in metrics.items() if named is None or name in named}

    def kept_norm(self, norm: float | None) -> float | None:
        """Return the norm of an update if it may be stored with the name of its client."""
        return norm if self.shows_clients else None

    def shown_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a client that may be shown."""
        return metrics if self.shows_clients else {}


OPEN = Disclosure()


def disclosure_of(spec: JobSpec) -> Disclosure:
    """Return the limits of a job."""
    options = spec.privacy
    if options is None:
        return OPEN
    return Disclosure(
        shows_clients=False,
        shows_cohorts=options.participation != "poisson",
        keeps_states=False,
        named_metrics=frozenset(options.metrics.bounds if options.metrics is not None else ()),
        is_charged=True,
    )
