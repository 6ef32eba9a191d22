"""`fedplat privacy`: plan, audit and show the privacy guarantees of jobs, and the budgets of populations."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from fedplat.cli import formats, options, planning, simulate
from fedplat.cli.output import ListColumn, ListLayout, Output, to_record
from fedplat.cli.session import WRONG_USAGE, FormatOption, session
from fedplat.command_line.with_typer import make_group
from fedplat.privacy.options import ADJACENCY
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2


def show(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job. Default: all private jobs.")] = "",
    form: FormatOption = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show the releases and costs of private jobs, and budgets.

    In JSON this is one object with jobs and populations.
    """
    with session(context, server, as_json, form=form) as command:
        found = command.client.show_privacy(job)
        if command.output.as_json:
            command.output.json(to_record(found))
        elif job and command.output.is_for_people:
            _show_one(command.output, found)
        else:
            output = command.output
            output.rows(found.jobs, BUDGET_LAYOUT, "there are no private jobs")
            if output.is_for_people:
                for population in found.populations:
                    output.line(_of_population(population))


def budget(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    population: Annotated[str, typer.Argument(metavar="POPULATION", help="Population that the budget protects.")],
    epsilon: Annotated[float | None, typer.Option(help="Total epsilon of all private jobs.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of the budget, such as 1e-6.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the budget.")] = False,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Set or remove the privacy budget of a population.

    A population with a budget accepts private jobs only.
    """
    with session(context, server, as_json) as command:
        if remove and epsilon is None and delta is None:
            command.client.remove_privacy_budget(population)
            command.output.note(f"population {population} has no privacy budget now")
            return
        if remove or epsilon is None or delta is None:
            command.output.error("expected --epsilon and --delta, or --remove")
            raise typer.Exit(WRONG_USAGE)
        made = command.client.set_privacy_budget(population, epsilon, delta)
        if command.output.as_json:
            command.output.json(to_record(made))
        else:
            command.output.line(_of_population(made))


def _show_one(output: Output, found: admin_pb2.ShowPrivacyResponse) -> None:
    (job,) = found.jobs
    if not job.is_private:
        output.line(f"job {job.job_id} ({job.name}) is not private: its job file has no [privacy]")
        return
    clip = f"{job.clip_norm:g}" + (" at first, then adaptive" if job.adaptive_clip else "")
    output.fields(
        {
            "job": f"{job.job_id} ({job.name}), {formats.job_status(job.status)}",
            "released": _of_cost(job.released, job.trust),
            "planned": _of_cost(job.planned, job.trust),
            "delta": f"{job.delta:g}",
            "adjacency": f"{job.adjacency}: {ADJACENCY.get(job.adjacency, '')}",
            "participation": f"{job.participation}: {job.sampling}",
            **({"noise": _NOISE_OF_CLIENTS} if job.trust == "none" else {}),
            "noise multiplier": _noise(job),
            "clip norm": clip,
            "budget of the job": f"epsilon {job.epsilon:g}" if job.HasField("epsilon") else "none except its rounds",
            "population": "; ".join(map(_of_population, found.populations)),
            "not covered": "; ".join(job.not_covered),
            "more": "docs/privacy.md",
        }
    )


_NOISE_OF_CLIENTS = "each client adds its part; each attempt with unmasked sums is a release, committed or not"
BUDGET_LAYOUT = ListLayout[admin_pb2.JobPrivacy](
    lambda job: job.job_id,
    (
        ListColumn("JOB", lambda job: job.job_id),
        ListColumn("NAME", lambda job: job.name),
        ListColumn("POPULATION", lambda job: job.population, is_wide=True),
        ListColumn("STATUS", lambda job: formats.job_status(job.status)),
        ListColumn("#RELEASES", lambda job: f"{job.released.releases} of {job.planned.releases}"),
        ListColumn("#EPSILON", lambda job: _number(job.released.epsilon)),
        ListColumn("#(RDP)", lambda job: _number(job.released.epsilon_rdp), is_wide=True),
        ListColumn("#PLANNED", lambda job: _number(job.planned.epsilon)),
        ListColumn("#DELTA", lambda job: f"{job.delta:g}"),
    ),
)


def _noise(job: admin_pb2.JobPrivacy) -> str:
    if math.isclose(job.noise_multiplier, job.model_noise_multiplier):
        return f"{job.noise_multiplier:g}"
    return f"{job.noise_multiplier:g} per round ({job.model_noise_multiplier:g} for the model, the rest for metrics)"


def _of_cost(cost: admin_pb2.PrivacyCost, trust: str) -> str:
    releases = f"{cost.releases} release" + ("" if cost.releases == 1 else "s")
    if trust == "none":
        return f"epsilon {_number(cost.epsilon)} by RDP, {releases}"
    return f"epsilon {_number(cost.epsilon)} by PLD ({_number(cost.epsilon_rdp)} by RDP), {releases}"


def _of_population(population: admin_pb2.PopulationPrivacy) -> str:
    jobs = format_count(population.num_private, "private job")
    if population.num_others:
        jobs += f", {population.num_others} without noise, which no budget covers"
    if not population.HasField("epsilon"):
        return f"population {population.population} has no budget: {jobs}"
    return (
        f"population {population.population} has the budget epsilon {population.epsilon:g} at delta "
        f"{population.delta:g}, of which {_number(population.committed.epsilon)} is released or planned: {jobs}"
    )


def _number(epsilon: float) -> str:
    return f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinite"


app = make_group("Plan, audit and show the privacy of jobs.")
app.command("plan")(planning.plan)
app.command("audit")(simulate.audit)
app.command("show")(show)
app.command("budget")(budget)
