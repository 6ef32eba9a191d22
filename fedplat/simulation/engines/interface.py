"""The `Engine` protocol, which trains simulated clients, its tasks and updates, and the memory of their processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from fedplat import system
from fedplat.model import Parameters


class ClientTask(NamedTuple):
    """The task of one client in one assignment: local training, or scoring a version if `scores` is true.

    `client` is the client's index in the fleet, from 0. `version` is the model version that training starts from.
    `seed` determines the batch order and all other randomness, so the result does not depend on when, where or together
    with which other clients it is computed. `fraction` is the part of the local steps that the client has time for: 1
    except for stragglers whose partial work counts. A task that scores trains nothing: the client evaluates the
    version, with its client state, on its held-out examples. `round_number` is that of the training, from 1; 0: the one
    after the version, as in rounds that each make a version.
    """

    client: int
    version: int
    seed: int
    fraction: float = 1.0
    scores: bool = False
    round_number: int = 0

    @property
    def training_round(self) -> int:
        """The number of the round, from 1, by which schedules of the learning rate go."""
        return self.round_number or self.version + 1


@dataclasses.dataclass(frozen=True, slots=True)
class LocalUpdate:
    """The result of local training: the difference from the base version, and the reported metrics.

    For a task that scores, `update` has no tensors and `num_examples` counts the examples that were scored.
    """

    update: Parameters
    num_examples: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@runtime_checkable
class Engine(Protocol):
    """Trains simulated clients. All engines return the same updates for the same tasks, to 1e-6.

    The driver publishes a version before any task names it, begins tasks as soon as it expects their reports to matter,
    as many at once as it can, and fetches each result once, in any order. A client has at most one task in progress.
    The engine stores the client states (a control variate, personal layers) between rounds.
    """

    @property
    def num_clients(self) -> int:
        """The number of clients that have data."""
        ...

    def num_examples(self, client: int) -> int:
        """Return the number of a client's training examples: its duration and weight are computed from it."""
        ...

    def publish(self, version: int, model: Parameters) -> None:
        """Add a committed version; `model` must not be changed afterwards."""
        ...

    def retire(self, version: int) -> None:
        """Mark a version as unused by later tasks; those in progress still use it."""
        ...

    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Begin tasks, now or when the first result is fetched; an engine may compute several together."""
        ...

    def result(self, task: ClientTask) -> LocalUpdate:
        """Wait for a task and return its result. Raises what the training raised."""
        ...

    def drop(self, task: ClientTask) -> None:
        """Discard a task whose result is not needed or was not merged, and restore its client's previous state.

        A task is dropped at most once, before or after its result is fetched.
        """
        ...

    def client_states(self) -> Mapping[int, Mapping[str, Parameters]]:
        """Return the client states by client and name; clients without a state are left out."""
        ...

    def set_client_states(self, client_states: Mapping[int, Mapping[str, Parameters]]) -> None:
        """Replace all client states when a stopped run resumes, before any task begins."""
        ...

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Score a model on the central test data; returns no metrics without such data."""
        ...

    def close(self) -> None:
        """End the engine's processes and free its memory."""
        ...


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep_freed_memory() -> None:
    """Keep freed memory for the next tensors. Does nothing if the C library is not glibc.

    By default, glibc maps every block of more than about 128 KiB anew, and the kernel takes longer to clear its pages
    than a small convolution takes to compute: with this setting a step of LeNet was 2.7 times faster on one machine.
    """
    if (mallopt := system.find_c_function("mallopt")) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)
