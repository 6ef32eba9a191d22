"""Requests and replies of the tasks that train and evaluate on the server's own data."""

from __future__ import annotations

import msgspec

from fedplat import aggregate, codecs
from fedplat.config.loaded_plugins import PluginReference
from fedplat.job.pool import ServerStep, WarmStart
from fedplat.parallel import Parallel


class TrainerReference(msgspec.Struct, frozen=True):
    """The name of a `ServerTrainer` (`module:object`); `folder` is added to `sys.path`."""

    reference: str
    folder: str


class TeacherModels(msgspec.Struct, frozen=True):
    """The clients' models of a round: the version that they started from, and the files of their updates, in order."""

    base: str
    updates: tuple[str, ...]
    uplink: codecs.CodecOptions | None


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A training by `warm_start` or `server_step`, the job's table of that name; with `teachers`, a distillation.

    The model is in the file `model`; the ranks write the trained one to the new file `result`. Entries that belong to
    the job's rule keep their values. Paths are absolute, and the same for all ranks. `plugins` are the job's plugins.
    With `parallel`, `num_ranks` ranks divide the model.
    """

    trainer: TrainerReference
    rule: aggregate.RuleOptions
    num_ranks: int
    model: str
    result: str
    warm_start: WarmStart | None = None
    server_step: ServerStep | None = None
    round_number: int = 0
    parallel: Parallel | None = None
    checkpoints: str = ""
    traces: str = ""
    teachers: TeacherModels | None = None
    plugins: tuple[PluginReference, ...] = ()


class TrainProgress(msgspec.Struct, frozen=True):
    """The number of completed training steps, and of all."""

    done: int
    total: int


class TrainReply(msgspec.Struct, frozen=True):
    """The outcome of a training: `error`, or the statistics once `result` is written.

    `first_loss` and `last_loss` are means over the first and the last tenth of the steps. `step_profile` has the
    metrics of `fedplat.step_profile` if steps were traced.
    """

    error: str = ""
    num_steps: int = 0
    num_examples: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0
    step_profile: dict[str, float] = {}


class EvaluateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of the model file `model` on a trainer's held-out examples; `parallel` as in `TrainRequest`."""

    trainer: TrainerReference
    rule: aggregate.RuleOptions
    model: str
    parallel: Parallel | None = None
    plugins: tuple[PluginReference, ...] = ()


class EvaluateReply(msgspec.Struct, frozen=True):
    """The metrics, or the error that prevented them."""

    error: str = ""
    metrics: dict[str, float] = {}
