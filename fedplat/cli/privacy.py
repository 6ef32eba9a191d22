"""`fedplat privacy`: plan, audit and show the privacy guarantees of jobs."""

from __future__ import annotations

import typer

from fedplat.cli import auditing, budgets, planning

app = typer.Typer(no_args_is_help=True, help="Plan, audit and show the privacy of jobs.")
app.command("plan")(planning.plan)
app.command("audit")(auditing.audit)
app.command("show")(budgets.show)
app.command("budget")(budgets.budget)
