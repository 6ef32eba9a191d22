"""The demo's plot: accuracy by round, and the numbers of reported and late clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(summary: dict[str, Any], path: Path, num_clients: int, goal: float) -> None:
    """Plot the accuracy by round, with the late clients below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rounds: list[dict[str, Any]] = summary["rounds"]
    numbers = [entry["round"] for entry in rounds]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=[3, 1], layout="constrained")
    scored = [(entry["round"], entry["accuracy"]) for entry in rounds if entry["accuracy"] is not None]
    top.plot(*zip(*scored, strict=True), marker="o", color="#1f5f8b", label="held-out accuracy")
    top.axhline(goal, linestyle="--", linewidth=1, color="#888888", label=f"goal {goal}")
    top.set_ylabel("accuracy")
    top.set_title(f"Handwritten digits, {num_clients} clients, Dirichlet(0.5): {scored[-1][1]:.1%} on held-out data")
    top.legend(loc="lower right")
    top.grid(alpha=0.3)
    reported, late = [entry["reported"] for entry in rounds], [entry["late"] for entry in rounds]
    bottom.bar(numbers, reported, color="#1f5f8b", label="reported")
    bottom.bar(numbers, late, bottom=reported, color="#d9822b", label="late")
    bottom.set_ylabel("clients")
    bottom.set_xlabel("round")
    bottom.set_xticks(numbers)
    bottom.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
