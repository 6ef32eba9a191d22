"""`fedplat privacy audit`: compare a job's privacy claim with a lower bound from canaries in one simulated run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.cli import options, output, progress, session
from fedplat.config.user_code import wrap_errors
from fedplat.errors import JobFileError
from fedplat.job import planning
from fedplat.simulation import api, privacy_audit
from fedplat.simulation import privacy_audit as audits
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import TABLE, SimulationFile


def audit(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Simulation file (TOML) of a private job.")],
    canaries: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of clients that are canaries; 0: half of them.")
    ] = 0,
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound, from 0.5 to below 1.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Seed to use instead of the file's simulation.seed.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file; repeatable.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Audit a private job with canaries in a simulation.

    Computes a lower bound of the job's epsilon. The exit status is 1 if the bound is above the job's claim.
    """
    with session.reporting(context, as_json) as out:
        if not 0.5 <= confidence < 1.0:
            raise JobFileError(f"--confidence {confidence:g}: expected from 0.5 to below 1")
        read = files.read(file, (changes or []) + ([] if seed is None else [f"simulation.seed={seed}"]))
        found = _run_audit(out, read, canaries, confidence)
        if out.as_json:
            out.json(folders.finite({**msgspec.to_builtins(found), "holds": found.holds}))
        else:
            _print(out, read, found)
        if not found.holds:
            raise typer.Exit(session.FAILED)


def _run_audit(out: output.Output, file: SimulationFile, canaries: int, confidence: float) -> privacy_audit.Audit:
    planning.require_privacy(file.job)
    if TABLE not in file.raw:
        raise JobFileError(f"{TABLE}: missing; expected a table that describes the simulated fleet and its data")
    board = progress.ProgressEstimate(file.job.name, file.job.rounds, file.simulation.target_metric, time.monotonic)
    on_progress: Callable[[str], object] = (lambda text: None) if out.as_json else out.note
    with (
        wrap_errors("the training"),
        api.prepare(file, on_progress=on_progress) as setup,
        progress.showing(out, board) as observe,
    ):
        return audits.run_audit(
            file, setup, num_canaries=canaries, confidence=confidence, observe=observe, on_replayed=board.begin
        )


def _print(out: output.Output, file: SimulationFile, found: privacy_audit.Audit) -> None:
    best, claimed = found.bound.best, found.claimed
    out.fields(
        {
            "claimed": f"epsilon {claimed.epsilon:.4g} at delta {claimed.delta:g} for {claimed.releases} releases",
            "canaries": f"{best.canaries} of {found.num_clients:,} clients; {found.included} were included, each in "
            f"{found.merged:.3g} of {file.job.rounds} rounds",
            "guesses": f"{best.guesses}, of which {best.right} were right",
            "lower bound": f"epsilon {found.bound.epsilon:.4g} with {found.confidence:.4g} confidence",
            "verdict": "consistent with the claim, but not a proof of it"
            if found.holds
            else f"THE CLAIM IS WRONG, except by chance, as in at most {1 - found.confidence:.2g} of audits",
        }
    )
