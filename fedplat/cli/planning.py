"""`fedplat privacy plan`: epsilon by rounds, cohort and noise, or by the examples of a client (`[config] dp`)."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fedplat import local_options, system, texts
from fedplat.cli import session, simulate
from fedplat.cli.options import JsonOption
from fedplat.cli.output import Output
from fedplat.config.user_code import wrap_errors
from fedplat.errors import JobFileError
from fedplat.job import JobSpec, planning
from fedplat.job.planning import NoiseCost, PrivacyPlan
from fedplat.privacy import Mechanism, losses
from fedplat.privacy.steps import StepCharge
from fedplat.simulation import api
from fedplat.simulation.data import Federation
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import TABLE, SimulationFile
from fedplat.simulation.setup import load_data

WITHOUT_NOISE = 1e-9
"""A multiplier that changes no digit of a model."""


def plan(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Job file or simulation file (TOML).")],
    clients: Annotated[
        int, typer.Option(min=0, max=10**9, metavar="N", help="Size of the population; 0: that of the file.")
    ] = 0,
    noise: Annotated[
        list[float] | None, typer.Option(metavar="Z", help="Noise multiplier to compare; repeatable.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file; repeatable.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the job with each noise multiplier, and without noise.")
    ] = False,
    examples: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=10**9, metavar="N", help="Number of a client's examples, with example-level privacy; repeatable."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a plot to a PNG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the privacy of a job.

    Shows its epsilon, and that of other numbers of rounds, cohorts and noise; for example-level privacy ([config] dp),
    epsilon by the numbers of a client's examples and rounds.
    """
    with session.reporting(context, as_json) as out:
        if plot is not None and plot.suffix.lower() != ".png":
            raise JobFileError(f"--plot {plot}: expected a name that ends in .png")
        read = files.read(file, changes or [])
        if (local := _example_level(read)) is not None:
            if simulate or plot is not None or noise:
                raise JobFileError("--simulate, --plot and --noise: expected a job with a table [privacy]")
            num_clients = clients or _clients(read, None)
            found = plan_examples(read.job, local, examples or (), num_clients)
            show_examples(out, read.job, local, found, num_clients)
            return
        data = _data(out, read) if simulate else None
        found = _make_plan(out, read, clients or _clients(read, data), noise or [])
        scores = _simulate_plan(out, read, found, data) if simulate else None
        if plot is not None:
            _draw(plot, read, found, scores)
        if out.as_json:
            out.json(_record(read, found, scores))
        else:
            _print(out, read, found, scores)


def _example_level(file: SimulationFile) -> local_options.LocalOptions | None:
    """Return the local options of a job with example-level privacy only; None for another."""
    if file.job.privacy is not None or file.job.config.get("dp", "none") == "none":
        return None
    return local_options.LocalOptions.from_config(file.job.config, file.plugins)


def _make_plan(out: Output, file: SimulationFile, clients: int, noise: Sequence[float]) -> PrivacyPlan:
    for multiplier in noise:
        if not 0.0 < multiplier <= 1e6:
            raise JobFileError(f"--noise {multiplier:g}: expected a number above 0, and 1e6 at most")
    if clients and clients < file.job.selection.goal:
        raise JobFileError(
            f"selection.goal = {file.job.selection.goal}: expected at most the {clients:,} clients of the population"
        )
    with out.steps("computing the costs of privacy") as progress, _processes(file) as run:
        return planning.plan(file.job, clients, noise, progress, run)


@contextlib.contextmanager
def _processes(file: SimulationFile) -> Generator[planning.MapFunction]:
    """Yield the `map` of a process pool for jobs with long computations, else the builtin one."""
    if file.job.privacy is None or file.job.privacy.participation != "poisson":
        yield map
        return
    ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the command, which ends the pool
    context = multiprocessing.get_context("spawn")
    workers = max(1, system.num_cores() - 1)  # this process computes, too
    with ProcessPoolExecutor(workers, context, signal.signal, ignore) as pool:
        for _ in range(workers):
            pool.submit(losses.load_library)  # they start and import while this process calibrates
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _clients(file: SimulationFile, data: Federation | None) -> int:
    """Return the population size by the simulation file."""
    if data is not None:
        return data.num_clients
    return getattr(file.simulation.partition, "clients", 0) or file.simulation.fleet.num_clients


def _data(out: Output, file: SimulationFile) -> Federation | None:
    if TABLE not in file.raw:
        raise JobFileError(f"{TABLE}: missing; --simulate requires a table that describes the fleet and its data")
    if not file.simulation.training:
        raise JobFileError("simulation.training = false: expected true with --simulate, which scores models")
    planning.require_privacy(file.job)
    return load_data(file, (lambda text: None) if out.as_json else out.note)


def _simulate_plan(
    out: Output, file: SimulationFile, plan: PrivacyPlan, data: Federation | None
) -> dict[float, float | None]:
    """Simulate each noise multiplier (0: without noise) and return the final metrics; None if the job is not valid."""
    scores: dict[float, float | None] = {}
    runs = (0.0, *(choice.noise_multiplier for choice in plan.by_noise))
    for number, multiplier in enumerate(runs, start=1):
        try:
            job = planning.with_noise(file.job, multiplier or WITHOUT_NOISE)
        except ValueError as exc:
            out.note(f"not simulated with noise multiplier {multiplier:g}: {exc}")
            scores[multiplier] = None
            continue
        name = f"noise multiplier {multiplier:g}" if multiplier else "without noise"
        if not out.as_json:
            out.note(f"simulation {number} of {len(runs)}: {name}")
        scores[multiplier] = _run(out, dataclasses.replace(file, job=job), name, data)
    return scores


def _run(out: Output, file: SimulationFile, name: str, data: Federation | None) -> float | None:
    board = simulate.ProgressEstimate(name, file.job.rounds, file.simulation.target_metric, time.monotonic)
    with wrap_errors("the training"), api.prepare(file, data) as setup, simulate.showing(out, board) as observe:
        last = api.execute(file, setup, observe, on_replayed=board.begin).summary.last
    return None if last is None else last.value


def _draw(path: Path, file: SimulationFile, found: PrivacyPlan, scores: dict[float, float | None] | None) -> None:
    from fedplat.simulation.report import plots, privacy

    picture = privacy.make_chart(file.job, found, scores, file.simulation.target_metric)
    try:
        plots.save(path, lambda figure: privacy.draw(figure, picture))
    except (OSError, ValueError) as exc:
        raise JobFileError(f"--plot {path}: the plot cannot be written: {exc}") from exc


def _record(file: SimulationFile, found: PrivacyPlan, scores: dict[float, float | None] | None) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.to_builtins(found)
    if scores is not None:
        record["metric"] = file.simulation.target_metric
        record["without_noise"] = scores[0.0]
        for row in record["by_noise"]:
            row["value"] = scores[row["noise_multiplier"]]
    return folders.finite(record)


def _print(out: Output, file: SimulationFile, found: PrivacyPlan, scores: dict[float, float | None] | None) -> None:
    out.fields(_facts(found))
    own = found.noise_multiplier
    out.line("")
    out.line("epsilon by number of rounds")
    rows = [
        (f"{each.rounds:,}", _number(each.epsilon), _number(each.epsilon_rdp), _mark(each.rounds == found.rounds))
        for each in found.by_rounds
    ]
    out.table(("#ROUNDS", "#EPSILON", "#BY RENYI", ""), rows, "")
    out.line("")
    rough = ", to about 0.1 %" if found.mechanism.kind == "poisson" else ""
    out.line(f"noise that other cohorts need for epsilon {found.budget:.4g}{rough}")
    spread = "#PROBABILITY" if found.mechanism.kind == "poisson" else "#ONCE IN"
    rows = [
        (
            f"{each.expected_reports:,}",
            f"{each.sampling_probability:.4g}" if found.mechanism.kind == "poisson" else _rounds(each.separation),
            "-" if each.noise_multiplier is None else f"{each.noise_multiplier:.4g}",
            "-" if each.deviation is None else f"{each.deviation:.3g}",
            _mark(each.expected_reports == found.expected_reports),
        )
        for each in found.by_cohort
    ]
    out.table(("#REPORTS", spread, "#NOISE MULTIPLIER", "#IN THE MEAN", ""), rows, "")
    out.line("")
    out.line(f"cost of other noise in {_rounds(found.rounds)}{rough}")
    columns = ["#NOISE MULTIPLIER", "#EPSILON", f"#ROUNDS WITHIN {found.budget:.4g}", "#IN THE MEAN"]
    if scores is not None:
        columns.append("#" + file.simulation.target_metric.upper())
    table: list[tuple[str, ...]] = []
    if scores is not None:
        table.append(("none", "-", "-", "0", _score(scores[0.0]), ""))
    for each in found.by_noise:
        shown = (f"{each.noise_multiplier:.4g}", _number(each.epsilon), _most(found, each), f"{each.deviation:.3g}")
        score = () if scores is None else (_score(scores[each.noise_multiplier]),)
        table.append((*shown, *score, _mark(each.noise_multiplier == own)))
    out.table((*columns, ""), table, "")
    for remark in found.remarks:
        out.note(f"note: {remark}")


def _facts(found: PrivacyPlan) -> dict[str, str]:
    spent = next(each.epsilon for each in found.by_rounds if each.rounds == found.rounds)
    why = f"calibrated for epsilon {found.budget:.4g}" if found.calibrated else "given"
    return {
        "job": f"{found.job}, of population {found.population}"
        + (f" ({found.num_clients:,} clients)" if found.num_clients else ""),
        "promise": f"epsilon {_number(spent)} at delta {found.delta:g} after {_rounds(found.rounds)}; adjacency: "
        f"{found.adjacency}",
        "participation": f"{_participation(found.mechanism)}; {found.expected_reports:,} expected reports",
        "noise": f"multiplier {found.noise_multiplier:.4g} ({why}); {found.deviation:.3g} clip norms in each entry of "
        f"{_what(found)}",
        "budget": f"enough for {_rounds(found.max_rounds)}"
        + ("" if found.max_rounds >= found.rounds else ": the job pauses before the next"),
    }


def _participation(mechanism: Mechanism) -> str:
    if mechanism.kind == "poisson":
        return f"each client with probability {mechanism.sampling_probability:.4g} in each round"
    turns = "every round" if mechanism.separation == 1 else f"one of any {_rounds(mechanism.separation)}"
    most = mechanism.max_participations
    return f"a client may take part in {turns}" + (f", and in {_rounds(most)} of the job" if most else "")


def _what(found: PrivacyPlan) -> str:
    return "a node of the tree over the rounds" if found.mechanism.kind == "tree" else "a round's mean"


def _most(found: PrivacyPlan, noise: NoiseCost) -> str:
    far = min(planning.MAX_ROUNDS, planning.MAX_ROUNDS_FACTOR * found.rounds)
    return f"{noise.max_rounds:,}" + ("+" if noise.max_rounds == far else "")


def _rounds(count: int) -> str:
    return texts.format_count(count, "round")


def _number(epsilon: float) -> str:
    return f"{epsilon:.2f}" if 0.1 <= epsilon < 1000 else f"{epsilon:.3g}"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _mark(is_own: bool) -> str:
    return "this job" if is_own else ""


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


def plan_examples(
    spec: JobSpec, options: local_options.LocalOptions, examples: Sequence[int] = (), num_clients: int = 0
) -> list[ExamplePlan]:
    """Return epsilon by the numbers of examples and of rounds. Raises `MissingExtraError` without Opacus."""
    from fedplat.pytorch.dp import epsilon
    from fedplat.pytorch.training.examples import StepSchedule

    found: list[ExamplePlan] = []
    for count in examples or EXAMPLES:
        schedule = StepSchedule(num_examples=count, options=options, seed=0, fraction=1.0)
        probability = min(1.0, schedule.step_size / count)
        for rounds in _rounds_to_show(spec, num_clients):
            steps = schedule.num_steps
            charge = StepCharge(options.dp_noise_multiplier, probability, steps * rounds)
            spent = epsilon([charge], options.dp_delta)
            found.append(
                ExamplePlan(examples=count, rounds=rounds, probability=probability, steps=steps, epsilon=spent)
            )
    return found


def _rounds_to_show(spec: JobSpec, num_clients: int) -> list[int]:
    """Return numbers of rounds of a client: parts of the job's, all of them, and the mean over the clients."""
    chosen = {max(1, round(part * spec.rounds)) for part in PARTS_OF_ROUNDS}
    if num_clients:
        chosen.add(_mean_rounds(spec, num_clients))
    return sorted(chosen)


def _mean_rounds(spec: JobSpec, num_clients: int) -> int:
    return min(spec.rounds, max(1, round(spec.rounds * spec.selection.goal / num_clients)))


def show_examples(
    out: Output, spec: JobSpec, options: local_options.LocalOptions, found: Sequence[ExamplePlan], num_clients: int
) -> None:
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
