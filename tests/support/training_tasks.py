"""What the tests of the pool's tasks on the server's own data run on each rank."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedplat.aggregate import FedAvg
from fedplat.job.tables import WarmStart
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat_server.workers.task_inputs import (
    EvaluateReply,
    EvaluateRequest,
    TrainerReference,
    TrainReply,
    TrainRequest,
)
from fedplat_server.workers.tasks import train


def ask(ranks: Ranks, folder: str, reference: str, layout: str, files: list[str], result: str) -> list[str]:
    """Train and evaluate the model in a file, which each rank finds elsewhere; return the errors in the replies."""
    parallel = Parallel.from_text(layout) if layout else None
    trainer, rule, model = TrainerReference(reference, folder), FedAvg(), str(Path(folder, files[ranks.rank]))
    options = WarmStart(trainer="t", batch_size=8, learning_rate=0.1)
    training = TrainRequest(
        trainer=trainer,
        rule=rule,
        num_ranks=ranks.size,
        model=model,
        result=str(Path(folder, result)),
        warm_start=options,
        parallel=parallel,
    )
    evaluation = EvaluateRequest(trainer=trainer, rule=rule, model=model, parallel=parallel)
    trained = train.train(ranks, msgspec.msgpack.encode(training), iter(()), lambda note: None)
    scored = train.evaluate(ranks, msgspec.msgpack.encode(evaluation), iter(()), lambda note: None)
    return [
        msgspec.msgpack.decode(trained, type=TrainReply).error,
        msgspec.msgpack.decode(scored, type=EvaluateReply).error,
    ]
