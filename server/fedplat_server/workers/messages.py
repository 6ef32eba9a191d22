"""Requests and replies of the tasks that train and evaluate on the server's own data."""

from __future__ import annotations

import msgspec

from fedplat import aggregate, codecs
from fedplat.job.pool import ServerStep, WarmStart


class TrainerReference(msgspec.Struct, frozen=True):
    """A `ServerTrainer` by its name, `module:object`; modules are also looked for in `folder`."""

    reference: str
    folder: str


class TeacherModels(msgspec.Struct, frozen=True):
    """The clients' models of a round: the version they started from, and the files of their updates, in order."""

    base: str
    updates: tuple[str, ...]
    uplink: codecs.Options | None


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A training, or a distillation if there are teachers, by one of a job's two tables.

    The model is in the file `model`; the ranks write the trained one into the new file `result`. The entries of the
    job's rule in the model stay as they are. Paths are absolute, and the same for all ranks.
    """

    trainer: TrainerReference
    rule: aggregate.Options
    num_ranks: int
    model: str
    result: str
    warm_start: WarmStart | None = None
    server_step: ServerStep | None = None
    round_number: int = 0
    checkpoints: str = ""
    traces: str = ""
    teachers: TeacherModels | None = None


class TrainProgress(msgspec.Struct, frozen=True):
    """The steps of a training that are done."""

    done: int
    total: int


class TrainReply(msgspec.Struct, frozen=True):
    """The end of a training: `error`, or the statistics of one whose `result` is written.

    `first_loss` and `last_loss` are means over the first and the last tenth of the steps.
    """

    error: str = ""
    num_steps: int = 0
    num_examples: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0


class EvaluateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be scored on a trainer's held-out examples."""

    trainer: TrainerReference
    rule: aggregate.Options
    model: str


class EvaluateReply(msgspec.Struct, frozen=True):
    """The metrics, or the error that prevented them."""

    error: str = ""
    metrics: dict[str, float] = {}
