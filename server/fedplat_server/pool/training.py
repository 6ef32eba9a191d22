"""Works of the ranks on the server's own data: `train` (also `distill`) and `evaluate`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from fedplat import updates
from fedplat.aggregate import Counterpart
from fedplat.backends import parallel
from fedplat.backends.parallel.trainer import agreed
from fedplat.backends.ranks import Ranks
from fedplat.errors import FedplatError, TrainingError
from fedplat.model import Parameters, Vector
from fedplat_server import files, references
from fedplat_server.pool.learning import Learned, Progress, Scored, Scoring, Teachers, Trainer, Training

TURN_S = 0.25
"""About how long a training goes on without giving other works their turn."""

Note: TypeAlias = Callable[[bytes], None]


def train(ranks: Ranks, request: bytes, inbox: Iterator[bytes], note: Note) -> bytes:
    """Trains a model; see `learning.Training`."""
    asked = msgspec.msgpack.decode(request, type=Training)
    try:
        learned = _learned(ranks, asked, note)
    except FedplatError as exc:  # on all ranks alike; whatever else is raised ends the ranks
        learned = Learned(error=str(exc))
    _hear_out(inbox)
    return msgspec.msgpack.encode(learned)


def evaluate(ranks: Ranks, request: bytes, inbox: Iterator[bytes], note: Note) -> bytes:
    """Scores a model; see `learning.Scoring`."""
    asked = msgspec.msgpack.decode(request, type=Scoring)
    try:
        trainer = agreed(ranks, lambda: _loaded(asked.trainer))
        model = asked.rule.build().counterpart.reduce(Parameters.open(asked.model))
        metrics = parallel.evaluate(ranks, trainer, model.copy())
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise TrainingError(f"the metric {bad[0]!r} is {metrics[bad[0]]}; expected a finite number")
        scored = Scored(metrics=metrics)
    except FedplatError as exc:
        scored = Scored(error=str(exc))
    _hear_out(inbox)
    return msgspec.msgpack.encode(scored)


def _hear_out(inbox: Iterator[bytes]) -> None:
    """Waits until the daemon has said that it has no more to say: who speaks to a closed connection hears no answer."""
    for _ in inbox:
        pass


class _Pace:
    """Tells how far a training is, about every `TURN_S`: then other works have their turn. All of `ranks` do alike."""

    def __init__(self, ranks: Ranks, note: Note) -> None:
        self._ranks, self._note = ranks, note
        self._every = self._left = 1
        self._began_at = time.monotonic()

    def stepped(self, done: int, total: int) -> None:
        """To be told of each step."""
        self._left -= 1
        if self._left or done == total:
            return
        took_s = time.monotonic() - self._began_at
        every = round(self._every * min(2.0, TURN_S / max(took_s, 1e-6)))
        # Rank 0 decides, since all have to wait after the same step.
        self._every = self._left = int.from_bytes(self._ranks.told(max(1, every).to_bytes(8)))
        self._note(msgspec.msgpack.encode(Progress(done, total)))
        self._began_at = time.monotonic()


def _learned(ranks: Ranks, asked: Training, note: Note) -> Learned:
    group = ranks.first(asked.num_ranks)
    trainer = agreed(ranks, lambda: _loaded(asked.trainer))
    options = asked.warm_start or asked.server_step
    assert options is not None
    work = parallel.ServerTraining(
        options=options,
        num_ranks=asked.num_ranks,
        round_number=asked.round_number,
        checkpoints=Path(asked.checkpoints) if asked.checkpoints else None,
        traces=Path(asked.traces) if asked.traces else None,
        note=_Pace(group or ranks, note).stepped,
    )
    counterpart = asked.rule.build().counterpart
    whole = Parameters.open(asked.model)
    model = counterpart.reduce(whole).copy()
    if asked.teachers is None:
        trained = parallel.train(ranks, trainer, model, work)
    else:
        trained = parallel.distill(ranks, trainer, model, _models(asked.teachers, counterpart), work)
    if trained is None:  # a rank more than the job has
        return Learned()
    if not model.is_finite():
        raise TrainingError(
            "the trained model holds NaN or infinite values; lower learning_rate, or set max_grad_norm or warmup_steps"
        )
    if ranks.is_first:
        _write(Path(asked.result), _with(whole, model))
    losses = trained.losses
    some = max(1, len(losses) // 10)
    first, last = (float(np.mean(part)) for part in (losses[:some], losses[-some:]))
    return Learned(num_steps=len(losses), num_examples=trained.num_examples, first_loss=first, last_loss=last)


def _loaded(trainer: Trainer) -> parallel.ServerTrainer:
    """Imports a trainer. Raises `ConfigError`, `ValueError`, and whatever its module raises."""
    found = references.load(trainer.reference, trainer.folder)
    if not isinstance(found, parallel.ServerTrainer):
        raise ValueError(
            f"{trainer.reference} is a {type(found).__name__}; expected fedplat.backends.parallel.ServerTrainer(...)"
        )
    return found


def _models(teachers: Teachers, counterpart: Counterpart) -> Iterator[Parameters]:
    """The clients' models, one after the other."""
    base = Parameters.open(teachers.base)
    step: Vector = np.empty(base.schema.num_floating, np.float32)
    for path in teachers.updates:
        start = 0
        for block in updates.open_update(path, base, teachers.uplink).to_blocks():
            step[start : start + block.size] = block
            start += block.size
        yield counterpart.reduce(base.plus(step))


def _with(whole: Parameters, model: Parameters) -> Parameters:
    """The whole model, with the trained values of those tensors that the trainer saw."""
    result = whole.copy()
    for name, values in model.items():
        result[name][...] = values
    return result


def _write(path: Path, model: Parameters) -> None:
    path.unlink(missing_ok=True)  # of ranks that died just after
    descriptor = files.create(path)
    try:
        files.write_all(descriptor, model.schema.header)
        files.write_all(descriptor, model.buffer.data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
