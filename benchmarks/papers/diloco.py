"""DiLoCo of a tiny GPT-2 beside one worker and synchronous training (Douillard et al. 2023, arXiv 2311.08105).

    python benchmarks/papers/diloco.py
    python benchmarks/papers/diloco.py --quick

A GPT-2 of 124,672 random parameters learns Shakespeare's plays as bytes, in rows of 64, with AdamW, whose rate rises
over the first 100 steps. Four workers have a quarter of the rows each, and make 16 rounds of H = 50 steps with 8 rows
each; their moments stay with them. The outer optimizer is the paper's: Nesterov's momentum 0.9 with a learning rate of
0.7. Synchronous training, in which the four add up their gradients in each of 800 steps, is that of one worker with
batches of 32 rows. The paper trains 150 million parameters on C4 for 88,000 steps, 24,000 of them before the workers
separate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reproduction import Cell, Log, Paper, Value, format_runs, main, play

WORKERS, ROUNDS, STEPS, BATCH, WARM_UP = 4, 16, 50, 8, 100


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table; `exchanges` is how often workers exchange updates or gradients."""

    label: str
    exchanges: int
    workers: int = 1
    batch: int = BATCH
    rule: str = 'rule = "fedavg"'


METHODS: Mapping[str, Method] = {
    "one": Method(label="one worker", exchanges=0),
    "synchronous": Method(label="synchronous, 4 × the batch", exchanges=ROUNDS * STEPS, batch=WORKERS * BATCH),
    "diloco": Method(
        label="DiLoCo, 4 workers",
        exchanges=ROUNDS,
        workers=WORKERS,
        rule='rule = "fedavgm"\nnesterov = true\nlearning_rate = 0.7\nmomentum = 0.9',
    ),
}


def cells() -> Iterator[Cell]:
    """Yield one cell for each method."""
    for name, method in METHODS.items():
        settings = f"""
name = "diloco-{name}"
population = "papers"
trainer = "papers"
rounds = {ROUNDS}
[model]
initial = "tiny_language_models.py:make_gpt2"
[config]
max_steps = {STEPS}
batch_size = {method.batch}
keep_optimizer = true
learning_rate = 3e-3
weight_decay = 0.1
schedule = "job"
lr_scheduler_type = "constant_with_warmup"
warmup_steps = {WARM_UP}
[selection]
goal = {method.workers}
over_selection = 1.0
[deadlines]
training_s = 36000
[updates]
weighting = "uniform"
[aggregation]
{method.rule}
[evaluation]
every = 4
[simulation]
engine = "loop"
[simulation.data]
source = "function"
call = "tiny_language_models.py:read_plays"
[simulation.partition]
scheme = "iid"
clients = {method.workers}
[simulation.model]
learner = "huggingface"
module = "tiny_language_models.py:make_gpt2"
"""
        yield Cell(name=name, settings=settings, quick=("rounds=1", "config.max_steps=1"))


def losses(logs: Sequence[Log], name: str) -> dict[int, float]:
    """Return the loss on the test rows after the last round, in nats per byte, by the seed."""
    return {log.seed: log.rounds[-1]["loss"] for log in logs if log.cell == name}


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the loss of each method, over the seeds, and its ratios to the others with the same seed."""
    found: list[tuple[Value, ...]] = []
    for name, method in METHODS.items():
        ours = losses(logs, name)
        ratios = [
            format_runs([value / base[seed] for seed, value in ours.items() if seed in base], digits=3)
            for base in (losses(logs, "synchronous"), losses(logs, "one"))
        ]
        found.append((method.label, format_runs([*ours.values()], digits=3), *ratios, method.exchanges, len(ours)))
    return found


PAPER = Paper(
    name="diloco",
    title="A tiny GPT-2 on Shakespeare's plays: loss on held-out rows after 800 steps, in nats per byte",
    source="Douillard et al. 2023, arXiv 2311.08105",
    columns=("training", "loss", "over synchronous", "over one worker", "exchanges", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
