"""Draw docs/images/accuracy-epsilon.png from the kept logs: the accuracy against the guaranteed epsilon.

python benchmarks/papers/private_picture.py
"""

from __future__ import annotations

from pathlib import Path

from private_utility import DELTA, EXPECTED, MULTIPLIERS, NONE, PAPER, ROUNDS, USERS, accuracy, cell_name, epsilon
from reproduction import HERE, RESULTS, Log, read_logs

PICTURE = HERE.parents[1] / "docs" / "images" / "accuracy-epsilon.png"


def draw(logs: list[Log], path: Path) -> None:
    """Plot the accuracy against epsilon, each run as a small point, and a line for the runs without noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    known = {each: mean for each in MULTIPLIERS if (mean := accuracy(logs, each)) is not None}
    noised = sorted((each for each in known if each != NONE), key=epsilon)
    for each in noised:
        single = [log.accuracies[-1] for log in logs if log.cell == cell_name(each)]
        axes.plot([epsilon(each)] * len(single), single, "o", color="#1f5f8b", alpha=0.35, markersize=4)
        axes.annotate(f"z = {each:g}", (epsilon(each), known[each]), (0, -16), textcoords="offset points", ha="center")
    axes.plot([epsilon(each) for each in noised], [known[each] for each in noised], "-o", color="#1f5f8b")
    if NONE in known:
        axes.axhline(known[NONE], linestyle="--", linewidth=1, color="#888888", label="the same without noise")
        axes.legend(loc="lower right")
    axes.set_xscale("log")
    axes.set_xticks([epsilon(each) for each in noised], [f"{epsilon(each):.2f}" for each in noised])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_xlabel(f"epsilon at delta {DELTA:g}: smaller promises more")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"MNIST, {USERS:,} users, {EXPECTED} expected a round, {ROUNDS} rounds")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(read_logs(PAPER, RESULTS), PICTURE)
