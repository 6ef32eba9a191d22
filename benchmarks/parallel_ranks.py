"""What the ranks of `parallel_training.py` do: a few steps in a layout, with their memory, time and bytes."""

from __future__ import annotations

import gc
import os
import re
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from typing_extensions import override

import parallel_models
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks, join_group
from fedplat.pytorch.parallel import ParallelTrainee, make_gradients, make_layout
from fedplat.pytorch.parallel.pipeline import Operation, PipelineGradients
from fedplat.pytorch.parallel.profiling import TracedExamples
from fedplat.pytorch.server import profiling
from fedplat.pytorch.training import (
    GradientComputation,
    Learner,
    LocalOptions,
    SingleProcessGradients,
    StepSchedule,
    Trainee,
    check_examples,
)
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from processes import FailedError

ROWS = 16
"""The examples of a step, over all ranks."""
TRANSFORMER = Learner(model=parallel_models.Transformer)
_NOT_TIMED = 2
"""Steps before the timed ones: the first one makes buffers, and the second one's messages are counted."""
_TRACED = 5
"""Steps of a trace: one that is skipped, one for the profiler's warm-up, and three."""
_FACTORS = {"allreduce": 2.0, "all_reduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "all_gather": 1.0}


class RankOperation(msgspec.Struct, frozen=True):
    """One operation of a pipeline, as an observer receives it."""

    kind: Operation
    stage: int
    micro_batch: int
    begin_s: float
    end_s: float


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured."""

    step_s: float
    """The median of the timed steps."""
    peak: int
    """Bytes of memory at most during the steps, above those before the model."""
    state: int
    """Bytes of parameters, gradients and the optimizer's state, counted."""
    sent: float
    """Bytes that a ring of ranks sends for the collectives of a step, and those of messages."""
    loss: float
    """The mean loss of the last step."""
    steps: tuple[tuple[RankOperation, ...], ...] = ()
    """The operations of each timed step."""


class Observer:
    """Keeps the operations of a pipeline."""

    def __init__(self) -> None:
        self.operations: list[RankOperation] = []

    def operation(self, kind: Operation, stage: int, micro_batch: int, begin_s: float, end_s: float) -> None:
        """Record one operation."""
        self.operations.append(RankOperation(kind, stage, micro_batch, begin_s, end_s))

    def take(self) -> tuple[RankOperation, ...]:
        """Return the operations since the last call."""
        taken, self.operations = tuple(self.operations), []
        return taken


class SentBytes(TorchDispatchMode):
    """Counts the bytes that a rank sends: those of a ring for collectives, of n ranks each (n - 1) / n of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations follow
        result = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            self._add(name, args, result)
        return result

    def _add(self, name: str, arguments: Any, result: Any) -> None:
        if name.startswith("send"):
            self.total += sum(map(_num_bytes, _tensors(arguments)))
            return
        factor = next((factor for each, factor in _FACTORS.items() if name.lstrip("_").startswith(each)), None)
        if factor is None:
            return
        # The whole data is on one side: the input of a reduce-scatter, the output of an all-gather.
        tensors = [*_tensors(arguments), *_tensors([result])]
        size = _group_size(arguments)
        self.total += factor * (size - 1) / size * max(map(_num_bytes, tensors))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _group_size(arguments: Any) -> int:
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            name = str(value._type())  # pyright: ignore
            if name.endswith("ProcessGroup"):
                return torch.distributed.ProcessGroup.unbox(value).size()
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            groups: Any = torch.distributed.distributed_c10d
            return groups._resolve_process_group(value).size()  # DTensor's collectives have names of groups
    raise FailedError("a collective without a group")


def measure(ranks: Ranks, layout: str, model: str, num_steps: int) -> RankResult:
    """Train the transformer for some steps; a `layout` of "" is one process without any."""
    before = _reset_peak()
    trainee, gradients, observer = _make(ranks, layout, TRANSFORMER, parallel_models.PLAN)
    trainee.load(Parameters.open(model), ClientState())
    stepper, optimizer = _make_stepper(trainee)
    gc.collect()
    _reset_peak()
    options = LocalOptions(learning_rate=1e-4, batch_size=ROWS, epochs=_NOT_TIMED + num_steps)
    plan = StepSchedule(num_examples=ROWS, options=options, seed=7)
    data = check_examples(TensorDataset(*parallel_models.make_tokens(ROWS)), ranks.device)
    steps = gradients.compute_steps(trainee, stepper, plan, data)
    counter, seconds, operations = SentBytes(), list[float](), list[tuple[RankOperation, ...]]()
    sums = gradient_bytes = 0
    for number in range(_NOT_TIMED + num_steps):
        ranks.barrier()
        observer.take()
        begin = time.perf_counter()
        if number == 1:
            with counter:
                scores = next(steps)
            gradient_bytes = sum(_own_bytes(each.grad) for each in trainee.parameters().values())
        else:
            scores = next(steps)
        stepper.step()
        ranks.barrier()
        if number >= _NOT_TIMED:
            seconds.append(time.perf_counter() - begin)
            operations.append(observer.take())
        sums = scores
    state = (value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor))
    return RankResult(
        step_s=statistics.median(seconds),
        peak=_status("VmHWM") - before,
        state=gradient_bytes + sum(map(_own_bytes, trainee.parameters().values())) + sum(map(_own_bytes, state)),
        sent=counter.total,
        loss=gradients.sum_scores(sums).means()["loss"],  # type: ignore[arg-type]
        steps=tuple(operations),
    )


def trace(ranks: Ranks, layout: str, model: str, folder: str) -> RankResult:
    """Train the transformer for a few steps; write what each rank did in three of them into a folder."""
    trainee, gradients, _ = _make(ranks, layout, TRANSFORMER, parallel_models.PLAN)
    trainee.load(Parameters.open(model), ClientState())
    stepper, _ = _make_stepper(trainee)
    options = LocalOptions(learning_rate=1e-4, batch_size=ROWS, epochs=_TRACED)
    plan = StepSchedule(num_examples=ROWS, options=options, seed=7)
    data = TracedExamples(check_examples(TensorDataset(*parallel_models.make_tokens(ROWS)), ranks.device))
    with profiling.trace_steps(Path(folder), ranks, _TRACED) as note:
        for _ in gradients.compute_steps(trainee, stepper, plan, data):
            stepper.step()
            note()
    return RankResult(step_s=0.0, peak=0, state=0, sent=0.0, loss=0.0)


def measure_sleeping(ranks: Ranks, layout: str, seconds: float) -> RankResult:
    """Train a pipeline whose ranks take `seconds` for a forward pass, and twice that for a backward pass."""
    parallel = Parallel.from_text(layout)
    each = seconds * parallel.pipeline / parallel.num_stages
    learner = Learner(
        model=lambda: parallel_models.SleepingModel(parallel.num_stages, each),
        loss=lambda outputs, targets: (outputs - targets).square().mean(),
    )
    trainee, gradients, observer = _make(ranks, layout, learner, parallel_models.SLEEPING_PLAN)
    trainee.load(learner.initial(0), ClientState())
    stepper, _ = _make_stepper(trainee)
    count = parallel.num_micro_batches
    plan = StepSchedule(
        num_examples=count, options=LocalOptions(learning_rate=1e-4, batch_size=count, epochs=3), seed=7
    )
    data = check_examples(TensorDataset(torch.ones(count, 1), torch.ones(count, 1)), ranks.device)
    steps: list[tuple[RankOperation, ...]] = []
    for _ in gradients.compute_steps(trainee, stepper, plan, data):
        stepper.step()
        ranks.barrier()
        steps.append(observer.take())
    return RankResult(step_s=0.0, peak=0, state=0, sent=0.0, loss=0.0, steps=tuple(steps[1:]))


def _make(ranks: Ranks, layout: str, learner: Learner, plan: Any) -> tuple[Trainee, GradientComputation, Observer]:
    observer = Observer()
    if not layout:
        return Trainee(learner, ranks.device, 0), SingleProcessGradients(), observer
    place = make_layout(ranks, Parallel.from_text(layout))
    trainee = ParallelTrainee(learner, place, plan)
    if place.parallel.pipeline > 1 and place.parallel.schedule != "pipedream":
        return trainee, PipelineGradients(place, 7, observer=observer), observer
    return trainee, make_gradients(place, 7), observer


def _make_stepper(trainee: Trainee) -> tuple[Stepper, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(trainee.parameters().values(), lr=1e-4)
    algorithm = StepAlgorithm(loss=make_loss(trainee.learner))
    options = LocalOptions(learning_rate=1e-4, batch_size=ROWS, epochs=1)
    return Stepper(trainee.parameters(), options, 1e-4, algorithm, make_optimizer=lambda _: optimizer), optimizer


def _own_bytes(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    return _num_bytes(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def _reset_peak() -> int:
    """Make the memory's peak its present value, which is returned in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def run(num_ranks: int, function: str, **arguments: Any) -> list[RankResult]:
    """Call a function of this module on each of `num_ranks` new processes. Raises `FailedError` if one fails."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["parallel_ranks"])
    with socket.socket() as port:  # bound, so no other program takes it; rank 0 may bind it again
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        started = [
            context.Process(
                target=_serve, args=(writer, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, function, arguments)
            )
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process, (_, writer) in zip(started, pipes, strict=True):
            process.start()
            writer.close()
        try:
            return [msgspec.msgpack.decode(reader.recv_bytes(), type=RankResult) for reader, _ in pipes]
        except EOFError as exc:
            raise FailedError(f"a rank of {function} with {arguments} failed; its error is above") from exc
        finally:
            for process in started:
                process.join(5.0)
                process.kill()


def _serve(writer: Connection, environment: Mapping[str, str], function: str, arguments: Mapping[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with join_group("gloo") as ranks:
        writer.send_bytes(msgspec.msgpack.encode(globals()[function](ranks, **arguments)))
