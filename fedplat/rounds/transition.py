"""What a step of a job is made of: what it is lent, what it does, and the answer to whoever caused it."""

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
    """What the outside world lends to a step: the moment, randomness, and fresh tokens (secret, hash)."""

    now: float
    rng: np.random.Generator
    new_token: Callable[[], tuple[str, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to whoever caused the event: accepted, or why not."""

    reason: Reason | None = None
    text: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the event did what it was meant to do (now or, repeated, before)."""
        return self.reason is None and not self.text


ACCEPTED = Verdict()


class Transition(Struct, frozen=True):
    """What an event does to a job."""

    job: JobState
    commands: tuple[Command, ...] = ()
    verdict: Verdict = ACCEPTED
