"""Tasks on the server's own data: `train` (also by distillation) and `evaluate`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from fedplat import durable, user_code
from fedplat.aggregate import ClientRequirements
from fedplat.codecs import container
from fedplat.errors import FedplatError, TrainingError
from fedplat.model import Parameters, Vector
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server.trainer import make_on_all_ranks
from fedplat_server.workers.messages import (
    EvaluateReply,
    EvaluateRequest,
    TeacherModels,
    TrainerReference,
    TrainProgress,
    TrainReply,
    TrainRequest,
)

TURN_S = 0.25
"""About how long a training runs until it lets other tasks run."""

Note: TypeAlias = Callable[[bytes], None]


def train(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Train a model; see `TrainRequest`."""
    wanted = msgspec.msgpack.decode(request, type=TrainRequest)
    try:
        reply = _train(ranks, wanted, note)
    except FedplatError as exc:  # on all ranks alike; everything else ends the ranks
        reply = TrainReply(error=str(exc))
    _wait_for_end(messages)
    return msgspec.msgpack.encode(reply)


def evaluate(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Score a model; see `EvaluateRequest`."""
    wanted = msgspec.msgpack.decode(request, type=EvaluateRequest)
    try:
        trainer = make_on_all_ranks(ranks, lambda: _load(wanted.trainer))
        model = wanted.rule.build().counterpart.reduce(Parameters.open(wanted.model))
        metrics = server.evaluate(ranks, trainer, model.copy())
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise TrainingError(f"the metric {bad[0]!r} is {metrics[bad[0]]}; expected a finite number")
        reply = EvaluateReply(metrics=metrics)
    except FedplatError as exc:
        reply = EvaluateReply(error=str(exc))
    _wait_for_end(messages)
    return msgspec.msgpack.encode(reply)


def _wait_for_end(messages: Iterator[bytes]) -> None:
    """Wait until the daemon has closed its side; a reply that is sent earlier could be lost."""
    for _ in messages:
        pass


class _ProgressReporter:
    """Reports the progress of a training about every `TURN_S`, and lets other tasks run; on all ranks alike."""

    def __init__(self, ranks: Ranks, note: Note) -> None:
        self._ranks, self._note = ranks, note
        self._interval = self._left = 1
        self._started_at = time.monotonic()

    def step(self, done: int, total: int) -> None:
        """Count a step, and report at the end of an interval."""
        self._left -= 1
        if self._left or done == total:
            return
        took_s = time.monotonic() - self._started_at
        interval = round(self._interval * min(2.0, TURN_S / max(took_s, 1e-6)))
        # Rank 0 decides, since all have to pause after the same step.
        self._interval = self._left = int.from_bytes(self._ranks.broadcast(max(1, interval).to_bytes(8)))
        self._note(msgspec.msgpack.encode(TrainProgress(done, total)))
        self._started_at = time.monotonic()


def _train(ranks: Ranks, wanted: TrainRequest, note: Note) -> TrainReply:
    group = ranks.subgroup(wanted.num_ranks)
    trainer = make_on_all_ranks(ranks, lambda: _load(wanted.trainer))
    options = wanted.warm_start or wanted.server_step
    assert options is not None
    work = server.TrainingRun(
        options=options,
        num_ranks=wanted.num_ranks,
        round_number=wanted.round_number,
        checkpoints=Path(wanted.checkpoints) if wanted.checkpoints else None,
        traces=Path(wanted.traces) if wanted.traces else None,
        note=_ProgressReporter(group or ranks, note).step,
    )
    counterpart = wanted.rule.build().counterpart
    whole = Parameters.open(wanted.model)
    model = counterpart.reduce(whole).copy()
    if wanted.teachers is None:
        trained = server.train(ranks, trainer, model, work)
    else:
        trained = server.distill(ranks, trainer, model, _load_teachers(wanted.teachers, counterpart), work)
    if trained is None:  # this rank is one more than the job has
        return TrainReply()
    if not model.is_finite():
        raise TrainingError(
            "the trained model holds NaN or infinite values; lower learning_rate, or set max_grad_norm or warmup_steps"
        )
    if ranks.is_first:
        _write(Path(wanted.result), _merge(whole, model))
    losses = trained.losses
    tenth = max(1, len(losses) // 10)
    first, last = (float(np.mean(part)) for part in (losses[:tenth], losses[-tenth:]))
    return TrainReply(num_steps=len(losses), num_examples=trained.num_examples, first_loss=first, last_loss=last)


def _load(trainer: TrainerReference) -> server.ServerTrainer:
    """Import a trainer. Raises `UserCodeError` and `ValueError`."""
    found = user_code.load(trainer.reference, Path(trainer.folder))
    if not isinstance(found, server.ServerTrainer):
        raise ValueError(
            f"{trainer.reference} is a {type(found).__name__}; expected fedplat.pytorch.server.ServerTrainer(...)"
        )
    return found


def _load_teachers(teachers: TeacherModels, counterpart: ClientRequirements) -> Iterator[Parameters]:
    """Yield the clients' models, one after the other."""
    base = Parameters.open(teachers.base)
    step: Vector = np.empty(base.schema.num_floating, np.float32)
    for path in teachers.updates:
        start = 0
        for block in container.open_update(path, base, teachers.uplink).to_blocks():
            step[start : start + block.size] = block
            start += block.size
        yield counterpart.reduce(base.plus(step))


def _merge(whole: Parameters, model: Parameters) -> Parameters:
    """Return the whole model, with the trained values of the tensors that the trainer got."""
    result = whole.copy()
    for name, values in model.items():
        result[name][...] = values
    return result


def _write(path: Path, model: Parameters) -> None:
    path.unlink(missing_ok=True)  # left by ranks that died just after
    descriptor = durable.create(path)
    try:
        durable.write_all(descriptor, model.schema.header)
        durable.write_all(descriptor, model.buffer.data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
