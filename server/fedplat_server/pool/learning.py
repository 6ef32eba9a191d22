"""What the daemon asks of ranks that train or score on the server's own data, and what they answer."""

from __future__ import annotations

import msgspec

from fedplat import aggregate, codecs
from fedplat.job.pool import ServerStep, WarmStart


class Trainer(msgspec.Struct, frozen=True):
    """Where a `ServerTrainer` is found; modules are also looked for in `folder`."""

    reference: str
    folder: str


class Teachers(msgspec.Struct, frozen=True):
    """The clients' models of a round: the version that they began with, and the files of their updates, in order."""

    base: str
    updates: tuple[str, ...]
    uplink: codecs.Options | None


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """A training, or a distillation if there are teachers, as one of a job's two tables asks for it.

    The model is in the file `model`; the ranks write what comes out into the new file `result`. What the job's rule
    keeps in the model stays as it is. Paths are absolute, and the same for all ranks.
    """

    trainer: Trainer
    rule: aggregate.Options
    num_ranks: int
    model: str
    result: str
    warm_start: WarmStart | None = None
    server_step: ServerStep | None = None
    round_number: int = 0
    checkpoints: str = ""
    traces: str = ""
    teachers: Teachers | None = None


class Progress(msgspec.Struct, frozen=True):
    """How far a training is."""

    done: int
    total: int


class Learned(msgspec.Struct, frozen=True):
    """How a training has ended: why it cannot be done, in words, or with `result` written.

    `first_loss` and `last_loss` are means over the first and the last tenth of the steps.
    """

    error: str = ""
    num_steps: int = 0
    num_examples: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be scored on a trainer's held-out examples."""

    trainer: Trainer
    rule: aggregate.Options
    model: str


class Scored(msgspec.Struct, frozen=True):
    """What was found, or why nothing could be."""

    error: str = ""
    metrics: dict[str, float] = {}
