"""The types of a step of a job: its context, its result, and the verdict on the event."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from fedplat.rounds.commands import Command
from fedplat.rounds.records import JobState
from fedplat.rounds.states import Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The inputs of a step from outside: the time, randomness, and new tokens (secret, hash)."""

    now: float
    rng: np.random.Generator
    new_token: Callable[[], tuple[str, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the sender of an event: accepted, or the reason why not."""

    reason: Reason | None = None
    text: str = ""

    @property
    def accepted(self) -> bool:
        """True if the event had its effect, now or (if it was repeated) before."""
        return self.reason is None and not self.text


ACCEPTED = Verdict()


class Transition(Struct, frozen=True):
    """The effect of an event on a job."""

    job: JobState
    commands: tuple[Command, ...] = ()
    verdict: Verdict = ACCEPTED
