"""`fedplat privacy plan` for example-level privacy (`[config] dp`): epsilon by a client's examples and its rounds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fedplat import texts
from fedplat.cli.output import Output
from fedplat.job import JobSpec
from fedplat.local_options import LocalOptions
from fedplat.privacy.steps import StepCharge

EXAMPLES = (100, 1000, 10_000)
"""Numbers of examples of a client for which epsilon is shown by default."""
PARTS_OF_ROUNDS = (0.1, 0.25, 0.5, 1.0)


class ExamplePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The epsilon of each example of a client that has `examples` of them and trained in `rounds` rounds.

    A training has `steps` steps, in each of which an example takes part with `probability`.
    """

    examples: int
    rounds: int
    probability: float
    steps: int
    epsilon: float


def plan(spec: JobSpec, options: LocalOptions, examples: Sequence[int] = (), num_clients: int = 0) -> list[ExamplePlan]:
    """Return epsilon by the numbers of examples and of rounds. Raises `MissingExtraError` without Opacus."""
    from fedplat.pytorch.dp import epsilon
    from fedplat.pytorch.training.schedule import StepSchedule

    found: list[ExamplePlan] = []
    for count in examples or EXAMPLES:
        schedule = StepSchedule(num_examples=count, options=options, seed=0, fraction=1.0)
        probability = min(1.0, schedule.step_size / count)
        for rounds in _rounds(spec, num_clients):
            steps = schedule.num_steps
            charge = StepCharge(options.dp_noise_multiplier, probability, steps * rounds)
            spent = epsilon([charge], options.dp_delta)
            found.append(
                ExamplePlan(examples=count, rounds=rounds, probability=probability, steps=steps, epsilon=spent)
            )
    return found


def _rounds(spec: JobSpec, num_clients: int) -> list[int]:
    """Return numbers of rounds of a client: parts of the job's, all of them, and the mean over the clients."""
    chosen = {max(1, round(part * spec.rounds)) for part in PARTS_OF_ROUNDS}
    if num_clients:
        chosen.add(_mean_rounds(spec, num_clients))
    return sorted(chosen)


def _mean_rounds(spec: JobSpec, num_clients: int) -> int:
    return min(spec.rounds, max(1, round(spec.rounds * spec.selection.goal / num_clients)))


def show(out: Output, spec: JobSpec, options: LocalOptions, found: Sequence[ExamplePlan], num_clients: int) -> None:
    """Print a plan."""
    if out.as_json:
        terms = {"level": "example", "delta": options.dp_delta, "noise_multiplier": options.dp_noise_multiplier}
        out.json(terms | {"rows": msgspec.to_builtins(found)})
        return
    fields = {
        "job": f"{spec.name}, of population {spec.population}",
        "promise": f"epsilon of each example of a client at delta {options.dp_delta:g}, by [config] "
        f'dp = "{options.dp}"; adjacency: one example more or less',
        "noise": f"multiplier {options.dp_noise_multiplier:g}, of the clipping norm {options.dp_max_grad_norm:g}",
    }
    if num_clients:
        mean = texts.format_count(_mean_rounds(spec, num_clients), "round")
        fields["participation"] = f"{mean} of {spec.rounds:,} on average over {num_clients:,} clients"
    out.fields(fields)
    out.line("")
    rows = [
        (f"{each.examples:,}", f"{each.rounds:,}", f"{each.probability:.4g}", f"{each.steps:,}", f"{each.epsilon:.4g}")
        for each in found
    ]
    out.table(("#EXAMPLES", "#ROUNDS", "#PROBABILITY", "#STEPS EACH", "#EPSILON"), rows, "")
    out.note("note: a client may take part in every round; its guarantee is that of all rounds, or its PrivacyLimit")
