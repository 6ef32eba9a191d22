"""Runs Flower's own apps, unchanged, from a checkout of its repository, and prints a table of what runs.

    FLOWER_REPO=/path/to/flower python tests/conformance/run.py [NAME ...] [--json FILE] [--jobs 1] [--write]

Each app runs in a process of its own (`one_app.py`) with local data sets (`local_data.py`). An app that needs a package
which is not installed is listed as such. The program ends with 1 if another app fails. `--write` puts the table into
docs/flower.md.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

HERE = Path(__file__).resolve().parent
E2E = (
    "bare",
    "bare-auth",
    "bare-https",
    "serverapp-heartbeat",
    "pytorch",
    "scikit-learn",
    "pandas",
    "opacus",
    "pytorch-lightning",
    "tensorflow",
    "jax",
    "fastai",
)
PATTERNS = ("examples/quickstart-*", "examples/advanced-*")
MORE = (
    "custom-mods",
    "embedded-devices",
    "federated-analytics",
    "federated-kaplan-meier-fitter",
    "federated-vae",
    "fl-dp-sa",
    "fl-tabular",
    "flower-secure-aggregation",
    "flower-simulation-step-by-step-pytorch/my-awesome-app",
    "opacus",
    "supernode-authentication",
    "vertical-fl",
    "xgboost-comprehensive",
)
RUN_CONFIG = ("num-server-rounds=2",)
"""Fewer rounds than the apps' own, as `flwr run --run-config` would ask for."""
LIMIT_S = 300.0
PAGE = HERE.parents[1] / "docs" / "flower.md"
BEGIN, END = "<!-- conformance -->", "<!-- end -->"
MAX_REASON = 200


class Outcome(msgspec.Struct, frozen=True):
    """What became of an app: `result` is "runs", "fails", "not installed" or "other flwr"."""

    app: str
    result: str
    reason: str
    seconds: float
    resumes: bool = False


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    jobs: int = 1,
    write: Annotated[bool, typer.Option("--write", help="Write the table of all apps into docs/flower.md.")] = False,
    commit: Annotated[str, typer.Option(help="Commit of the checkout. Default: what git says.")] = "",
) -> None:
    """Run the apps whose paths contain one of the names; all of them without names."""
    repository = Path(os.environ.get("FLOWER_REPO", "")).resolve()
    if not os.environ.get("FLOWER_REPO") or not (repository / "examples").is_dir():
        sys.exit("FLOWER_REPO names no checkout of Flower; expected a folder with examples/ and framework/e2e/")
    if write and names:
        sys.exit("--write needs the results of all apps; expected no NAME")
    commit = commit or read_commit(repository)
    apps = [each for each in find_apps(repository) if not names or any(name in str(each) for name in names)]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(run_and_report, apps, itertools.repeat(repository)))
    print(f"\n{sum(each.result == 'runs' for each in outcomes)} of {len(outcomes)} apps run")
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
    if write:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{make_table(outcomes, commit)}\n{END}{rest.split(END)[1]}", "utf-8")
    if any(each.result == "fails" for each in outcomes):
        sys.exit(1)


def read_commit(repository: Path) -> str:
    """Return the commit of a checkout, if it is one of git."""
    done = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def make_table(outcomes: Sequence[Outcome], commit: str) -> str:
    """Return the results as text of a page."""
    version = importlib.metadata.version("flwr")
    count = sum(each.result == "runs" for each in outcomes)
    lines = [
        f"{count} of {len(outcomes)} apps run, with `flwr` {version} and the apps of commit `{commit[:12]}`:",
        "",
        "| app | runs | after a crash | clients and messages, or why it does not run |",
        "|---|---|---|---|",
    ]
    for each in outcomes:
        runs = each.result == "runs"
        crash = ("continues" if each.resumes else "begins anew") if runs else ""
        cells = f"`{each.app}`", "yes" if runs else "no", crash, each.reason if runs else explain(each, version)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def explain(outcome: Outcome, version: str) -> str:
    """Return in short why an app does not run."""
    reason = outcome.reason
    if found := re.search(r"cannot import name '([^']+)' from '([^']+)'", reason):
        return f"imports `{found[2]}.{found[1]}`, which `flwr` {version} does not have"
    if found := re.search(r"No module named '([^']+)'", reason):
        missing = f"`flwr` {version} does not have" if outcome.result == "other flwr" else "is not installed"
        return f"imports `{found[1]}`, which {missing}"
    if "URLError" in reason:
        return "downloads files that have no local replacement"
    reason = re.sub(r" [(][^()]*, line [0-9]+[)]", "", reason).replace("|", "/")
    return reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " ..."


def find_apps(repository: Path) -> list[Path]:
    """Return the folders of the apps."""
    found = [repository / "framework" / "e2e" / f"e2e-{name}" for name in E2E]
    found += [folder for pattern in PATTERNS for folder in sorted(repository.glob(pattern))]
    found += [repository / "examples" / name for name in MORE]
    return [folder for folder in found if (folder / "pyproject.toml").is_file()]


def run(app: Path, repository: Path) -> Outcome:
    """Run an app in a process of its own."""
    start = time.monotonic()
    options = [option for each in RUN_CONFIG for option in ("--run-config", each)]
    environment = {**os.environ, "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "", "FLWR_TELEMETRY_ENABLED": "0"}
    command = [sys.executable, HERE / "one_app.py", app, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as one:
        try:
            output, errors = one.communicate(timeout=LIMIT_S)
            lines = output.strip().splitlines()
            result: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"ok": False}
            reason = result.get("reason") or (errors.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            os.killpg(one.pid, signal.SIGKILL)  # with the processes of its clients
            result, reason = {"ok": False}, f"took longer than {LIMIT_S:.0f} s"
    seconds = round(time.monotonic() - start, 1)
    name = str(app.relative_to(repository))
    if result["ok"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in result["sets"].items())
        return Outcome(name, "runs", f"{result['nodes']} clients: {counts or 'no message'}", seconds, result["resumes"])
    return Outcome(name, classify(reason), reason, seconds)


def classify(reason: str) -> str:
    """Return the result of an app that does not run."""
    if re.search(r"No module named 'flwr[.']|cannot import name .* from 'flwr[.']", reason):
        return "other flwr"  # it uses a name that the installed version does not have
    return "not installed" if "No module named" in reason else "fails"


def run_and_report(app: Path, repository: Path) -> Outcome:
    """Run an app, and print its row of the table."""
    outcome = run(app, repository)
    resumes = "resumes" if outcome.resumes else ""
    print(f"{outcome.app:58} {outcome.result:13} {outcome.seconds:6.1f} s  {resumes:7}  {outcome.reason}", flush=True)
    return outcome


if __name__ == "__main__":
    typer.run(main)
