"""Adapters of a tiny language model, federated, alone and central: perplexity on held-out lines of Shakespeare's plays.

    python benchmarks/papers/federated_adapters.py --seeds 0 1 2
    python benchmarks/papers/federated_adapters.py --quick

The base, a Llama of 106,816 parameters, has learnt the lines of the small speakers for 500 steps. The clients are the
eight speakers with most lines, which are in rot13, so that there is something to learn: 48 rows of 64 bytes each; the
256 rows that follow are held out. Adapters (LoRA) of rank 4 learn for 10 rounds of 10 steps with AdamW, 16 rows each.
No paper has this table; it compares methods of several papers with each other, with training alone, and with central
training.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reproduction import Cell, Log, Paper, Value, format_runs, main, play

ROUNDS, STEPS, BATCH, RATE = 10, 10, 16, 1e-2
NUM_SPEAKERS = 8
ALONE, CENTRAL, FEDAVG = "alone", "central", "fedavg"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of the table. With `pooled` one client has the rows of all speakers."""

    label: str
    clients: int = NUM_SPEAKERS
    pooled: bool = False
    rounds: int = ROUNDS
    steps: int = STEPS
    rate: float = RATE
    model: str = "make_adapted"
    personal: str = ""
    rule: str = 'rule = "fedavg"'
    config: str = ""
    sends: bool = True
    """Whether its clients send updates that are merged with those of others."""


METHODS: Mapping[str, Method] = {
    # A step of this size is lost in the rounding of all weights.
    "base": Method(label="base, not trained", rounds=1, steps=1, rate=1e-30, sends=False),
    ALONE: Method(label="each speaker alone, on its own lines", clients=1, sends=False),
    FEDAVG: Method(label="FedAvg of both factors"),
    "ffa": Method(label="FFA-LoRA", model="make_half_adapted"),
    "rolora": Method(label="RoLoRA", config='alternate = "*lora_B*, *lora_A*"'),
    "fedex": Method(label="FedEx-LoRA", rule='rule = "fedex_lora"\nscaling = 2.0'),
    "flora": Method(label="FLoRA", rule='rule = "flora"\nscaling = 2.0'),
    "fedsa": Method(label="FedSA-LoRA, on each speaker's own lines", personal='"*lora_B*"'),
    CENTRAL: Method(label="central, with as many steps", clients=1, pooled=True, sends=False),
    "central-8": Method(label="central, with 8 times as many", clients=1, pooled=True, steps=8 * STEPS, sends=False),
}


def cells() -> Iterator[Cell]:
    """Yield one cell for each method, and one for each speaker that trains alone."""
    for name, method in METHODS.items():
        if name == ALONE:
            for speaker in range(NUM_SPEAKERS):
                yield _make_cell(f"{ALONE}-{speaker}", method, f"first = {speaker}, count = 1")
        else:
            yield _make_cell(name, method, "pooled = true" if method.pooled else "")


def _make_cell(name: str, method: Method, data: str) -> Cell:
    settings = f"""
name = "adapters-{name}"
population = "papers"
trainer = "papers"
rounds = {method.rounds}
[model]
initial = "tiny_language_models.py:{method.model}"
[config]
epochs = 1
max_steps = {method.steps}
batch_size = {BATCH}
optimizer = "adamw"
learning_rate = {method.rate}
{method.config}
[selection]
goal = {method.clients}
over_selection = 1.0
[deadlines]
training_s = 36000
[aggregation]
{method.rule}
[evaluation]
every = {method.rounds}
[evaluation.clients]
evaluator = "papers"
goal = {method.clients}
[simulation]
engine = "loop"
[simulation.data]
source = "function"
call = "tiny_language_models.py:federate"
arguments = {{ {data} }}
[simulation.model]
share = "trained"
personal = [{method.personal}]
"""
    return Cell(name=name, settings=settings, quick=("rounds=1", "config.max_steps=1"))


def perplexities(logs: Sequence[Log], name: str) -> dict[int, float]:
    """Return the perplexity of all held-out rows after the last round, by the seed.

    Each speaker scores the model on its own rows. All hold out as many, so the mean of their losses is that of all.
    """
    names = {f"{ALONE}-{speaker}" for speaker in range(NUM_SPEAKERS)} if name == ALONE else {name}
    found: dict[int, float] = {}
    for seed in sorted({log.seed for log in logs}):
        scores = [log.evaluations[-1] for log in logs if log.cell in names and log.seed == seed]
        if len(scores) == len(names):
            found[seed] = math.exp(statistics.mean(each["metrics"]["loss"] for each in scores))
    return found


def rows(logs: Sequence[Log]) -> list[tuple[Value, ...]]:
    """Return the perplexity of each method, over the seeds, and its ratios to others with the same seed."""
    alone, central = perplexities(logs, ALONE), perplexities(logs, CENTRAL)
    return [
        (
            method.label,
            format_runs([*(ours := perplexities(logs, name)).values()]),
            _format_ratios(ours, alone),
            _format_ratios(ours, central),
            _find_sent_bytes(logs, name) if method.sends else "-",
            len(ours),
        )
        for name, method in METHODS.items()
    ]


def _format_ratios(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    return format_runs([value / base[seed] for seed, value in values.items() if seed in base], digits=3)


def _find_sent_bytes(logs: Sequence[Log], name: str) -> Value:
    """Return the bytes that a client sends in a round, on average over the rounds."""
    lines = [line for log in logs if log.cell == name for line in log.rounds]
    sent, merged = (sum(line[key] for line in lines) for key in ("bytes_up", "merged"))
    return round(sent / merged) if lines else "not run"


PAPER = Paper(
    name="federated_adapters",
    title="Adapters of a tiny Llama, eight speakers: perplexity of held-out lines",
    source="methods of several papers, see docs/language-models.md",
    columns=("method", "perplexity", "over alone", "over central", "sent bytes per client and round", "runs"),
    cells=tuple(cells()),
    rows=rows,
    play=play,
)

if __name__ == "__main__":
    sys.exit(main(PAPER))
