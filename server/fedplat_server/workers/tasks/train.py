"""Tasks on the server's own data: `train` (also by distillation) and `evaluate`."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from fedplat import durable, errors
from fedplat.aggregate import ClientRequirements
from fedplat.aggregate.drift import without_control
from fedplat.codecs import container
from fedplat.config import loaded_plugins, user_code
from fedplat.model import Parameters, Vector, is_finite
from fedplat.pytorch import server
from fedplat.pytorch.distributed import STEP_BYTES, Ranks, work_in_steps
from fedplat.pytorch.server.trainer import make_on_all_ranks
from fedplat_server.workers import task_inputs

TURN_S = 0.25
"""About how long a training runs before it lets other tasks run."""

Note: TypeAlias = Callable[[bytes], None]


def train(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Train a model by a `TrainRequest`; return a `TrainReply`."""
    decoded = loaded_plugins.decode_with_plugins(request, task_inputs.TrainRequest)
    try:
        reply = _train(ranks, decoded, note)
    except errors.FedplatError as exc:  # raised on all ranks; any other error ends the ranks
        reply = task_inputs.TrainReply(error=str(exc))
    _wait_for_end(messages)
    return msgspec.msgpack.encode(reply)


def evaluate(ranks: Ranks, request: bytes, messages: Iterator[bytes], note: Note) -> bytes:
    """Evaluate a model by an `EvaluateRequest`; return an `EvaluateReply`."""
    decoded = loaded_plugins.decode_with_plugins(request, task_inputs.EvaluateRequest)
    try:
        trainer = make_on_all_ranks(ranks, lambda: _load(decoded.trainer))
        whole = make_on_all_ranks(ranks, lambda: Parameters.open(decoded.model), "the model's file")
        model = decoded.rule.build().requirements.reduce(whole)
        if decoded.parallel is None:
            model = model.copy()
        metrics = server.evaluate(ranks, trainer, model, parallel=decoded.parallel, pins=decoded.pins)
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise errors.TrainingError(f"the metric {bad[0]!r} is {metrics[bad[0]]}; expected a finite number")
        reply = task_inputs.EvaluateReply(metrics=metrics)
    except errors.FedplatError as exc:
        reply = task_inputs.EvaluateReply(error=str(exc))
    _wait_for_end(messages)
    return msgspec.msgpack.encode(reply)


def _wait_for_end(messages: Iterator[bytes]) -> None:
    """Wait until the daemon has closed its side; a reply that is sent earlier could be lost."""
    for _ in messages:
        pass


class _ProgressReporter:
    """Reports the progress of a training about every `TURN_S`, and lets other tasks run; all ranks call it."""

    def __init__(self, ranks: Ranks, note: Note) -> None:
        self._ranks, self._note = ranks, note
        self._interval = self._steps_left = 1
        self._started_at = time.monotonic()

    def step(self, done: int, total: int) -> None:
        """Count a step, and report at the end of an interval."""
        self._steps_left -= 1
        if self._steps_left or done == total:
            return
        elapsed_s = time.monotonic() - self._started_at
        interval = round(self._interval * min(2.0, TURN_S / max(elapsed_s, 1e-6)))
        # Rank 0 decides, since all ranks must pause after the same step.
        self._interval = self._steps_left = int.from_bytes(self._ranks.broadcast(max(1, interval).to_bytes(8)))
        self._note(msgspec.msgpack.encode(task_inputs.TrainProgress(done, total)))
        self._started_at = time.monotonic()


def _train(ranks: Ranks, request: task_inputs.TrainRequest, note: Note) -> task_inputs.TrainReply:
    trainer = make_on_all_ranks(ranks, lambda: _load(request.trainer))
    options = request.warm_start or request.server_step
    assert options is not None
    run = server.TrainingRun(
        options=options,
        num_ranks=request.num_ranks,
        parallel=request.parallel,
        pins=request.pins,
        round_number=request.round_number,
        checkpoints=Path(request.checkpoints) if request.checkpoints else None,
        traces=Path(request.traces) if request.traces else None,
    )
    group = run.find_group(ranks)
    run = dataclasses.replace(run, note=_ProgressReporter(group or ranks, note).step)
    whole = make_on_all_ranks(ranks, lambda: Parameters.open(request.model), "the model's file")
    requirements = request.rule.build().requirements
    if request.parallel is not None and _only_hides_control(requirements, whole):
        trained = _train_in_file(ranks, trainer, whole, Path(request.result), run)
    else:
        model = requirements.reduce(whole).copy()
        if request.teachers is None:
            trained = server.train(ranks, trainer, model, run)
        else:
            trained = server.distill(ranks, trainer, model, _load_teachers(request.teachers, requirements), run)
        if trained is not None:
            assert group is not None
            _check_finite(group, model)
        if trained is not None and ranks.is_first:
            _write(Path(request.result), _merge(whole, model))
    if trained is None:  # the job needs fewer ranks, and not this one
        return task_inputs.TrainReply()
    losses = trained.losses
    tenth = max(1, len(losses) // 10)
    first, last = (float(np.mean(part)) for part in (losses[:tenth], losses[-tenth:]))
    return task_inputs.TrainReply(
        num_steps=len(losses),
        num_examples=trained.num_examples,
        first_loss=first,
        last_loss=last,
        step_profile={} if trained.profile is None else trained.profile.to_metrics(),
    )


def _train_in_file(
    ranks: Ranks, trainer: server.ServerTrainer, whole: Parameters, path: Path, run: server.TrainingRun
) -> server.TrainingCurve | None:
    """Train a model that is divided among ranks, none of which has a copy of all of it in memory.

    They read their parts from the mapped file `whole`; rank 0 writes the result, tensor by tensor, to a file.
    """

    what = "the result's file"
    work_in_steps(ranks, _copy(path if ranks.is_first else None, whole), what)
    model = make_on_all_ranks(ranks, lambda: _map(path, whole) if ranks.is_first else whole, what)
    trained = server.train(ranks, trainer, model, run)
    if trained is not None:
        group = run.find_group(ranks)
        assert group is not None
        _check_finite(group, model)
    if ranks.is_first:
        durable.sync(path)
    return trained


def _only_hides_control(requirements: ClientRequirements, whole: Parameters) -> bool:
    """Return whether a rule leaves a model's tensors as they are in the file, except for control variates."""
    return requirements.reduce is without_control or requirements.reduce(whole) is whole


def _check_finite(group: Ranks, model: Parameters) -> None:
    """Raise `TrainingError`, on all ranks alike, if rank 0 has a model with NaN or infinite values."""
    finite = True

    def check() -> Iterator[int]:
        nonlocal finite
        length = STEP_BYTES // 4
        for first in range(0, model.schema.num_floating, length):
            columns = range(first, min(first + length, model.schema.num_floating))
            finite = finite and (not group.is_first or is_finite(model.to_blocks(columns)))
            yield first

    work_in_steps(group, check(), "the trained model")
    if group.broadcast(b"finite" if finite else b"") != b"finite":
        raise errors.TrainingError(
            "the trained model holds NaN or infinite values; lower learning_rate, or set max_grad_norm or warmup_steps"
        )


def _load(trainer: task_inputs.TrainerReference) -> server.ServerTrainer:
    """Import a trainer. Raises `UserCodeError` if that fails, `ValueError` if the object is not a `ServerTrainer`."""
    loaded = user_code.load(trainer.reference, Path(trainer.folder))
    if not isinstance(loaded, server.ServerTrainer):
        raise ValueError(
            f"{trainer.reference} is a {type(loaded).__name__}; expected fedplat.pytorch.server.ServerTrainer(...)"
        )
    return loaded


def _load_teachers(teachers: task_inputs.TeacherModels, requirements: ClientRequirements) -> Iterator[Parameters]:
    """Yield the clients' models."""
    base = Parameters.open(teachers.base)
    step: Vector = np.empty(base.schema.num_floating, np.float32)
    for path in teachers.updates:
        start = 0
        for block in container.open_update(path, base, teachers.uplink).to_blocks():
            step[start : start + block.size] = block
            start += block.size
        yield requirements.reduce(base.plus(step))


def _merge(whole: Parameters, model: Parameters) -> Parameters:
    """Return a copy of the whole model with the trained tensors in it."""
    result = whole.copy()
    for name, values in model.items():
        result[name][...] = values
    return result


def _map(path: Path, model: Parameters) -> Parameters:
    """Map the file of a model into memory, so that it changes with its values."""
    content = np.memmap(path, np.uint8, mode="r+", offset=len(model.schema.header))
    return Parameters(model.schema, np.asarray(content))


def _copy(path: Path | None, model: Parameters) -> Iterator[int]:
    """Write a model to a new file, which is not synced yet, in steps; without a path, have as many empty steps."""
    descriptor = -1
    if path is not None:
        path.unlink(missing_ok=True)  # left by ranks that died after writing it
        descriptor = durable.create(path)
    try:
        for piece in model.pieces:
            for first in range(0, len(piece), STEP_BYTES):
                if path is not None:
                    durable.write_all(descriptor, piece[first : first + STEP_BYTES])
                yield first
    finally:
        if path is not None:
            os.close(descriptor)


def _write(path: Path, model: Parameters) -> None:
    path.unlink(missing_ok=True)  # left by ranks that died after writing it
    descriptor = durable.create(path)
    try:
        durable.write_all(descriptor, model.schema.header)
        durable.write_all(descriptor, model.buffer.data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
