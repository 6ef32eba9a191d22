"""How many times as fast fedplat is as other platforms, from the saved results: a table, and its picture.

`python benchmarks/page.py` writes both: docs/performance.md begins with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

import report

NAME = "times-as-fast"
PEERS = {"Flower": "#d9822b", "NVFlare": "#7a5195", "pfl-research": "#3d9970"}
"""The platforms, with the colours of their bars."""
_FILES = {
    "whole-rounds": "round, ",
    "flower_apps": "Flower app, ",
    "simulation-peers": "simulation, ",
    "gpu": "simulation on a GPU, ",
}
PICTURE = report.HERE.parent / "docs" / "images" / f"{NAME}.png"


@dataclass(frozen=True)
class Comparison:
    """One work: what fedplat needs, as text, and by platform how many times as fast fedplat is."""

    work: str
    own: str
    times: Mapping[str, float]


def read() -> list[Comparison]:
    """Return the works that another platform has done, too: the better of its set-ups against the default of fedplat.

    A simulation has no default engine: there fedplat's fastest is compared.
    """
    return [found for name, prefix in _FILES.items() for found in _compare(name, prefix) if found.times]


def _compare(name: str, prefix: str) -> Iterator[Comparison]:
    saved = msgspec.json.decode((report.RESULTS / f"{name}.json").read_bytes(), type=report.Report)
    unit, measured = saved.columns[2], saved.rows
    if unit == "result":  # the unit is in the next column
        unit, measured = "rounds/s", [row for row in measured if row[3] == "rounds/s"]
    is_rate = unit.endswith("/s")
    better = max if is_rate else min
    for work in dict.fromkeys(row[0] for row in measured):
        rows = [(str(system), float(value)) for found, system, value, *_ in measured if found == work and value]
        own = better(value for system, value in rows if system == "fedplat" or (is_rate and "fedplat" in system))
        best = {peer: [value for system, value in rows if system.startswith(peer)] for peer in PEERS}
        times = {peer: better(values) / own for peer, values in best.items() if values}
        if is_rate:
            times = {peer: 1 / each for peer, each in times.items()}
        shown = f"{report.shown(own)} {unit if is_rate else 's'}"
        yield Comparison(f"{prefix}{work}", shown, times)


def markdown() -> str:
    """Return the table."""
    lines = [
        f"| work | fedplat | {' | '.join(f'times as fast as {peer}' for peer in PEERS)} |",
        "| --- |" + " ---: |" * 4,
    ]
    for found in read():
        cells = (report.shown(found.times[peer]) if peer in found.times else "" for peer in PEERS)
        lines.append(f"| {found.work} | {found.own} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path = PICTURE) -> None:
    """Draw a bar for each number of the table, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bars = [
        (found.work, peer, times) for found in reversed(read()) for peer, times in reversed(list(found.times.items()))
    ]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(bars) + 1), layout="constrained")
    places = range(len(bars))
    drawn = axes.barh(places, [times for _, _, times in bars], color=[PEERS[peer] for _, peer, _ in bars])
    axes.bar_label(drawn, [f"{report.shown(times)} x {peer}" for _, peer, times in bars], padding=3, fontsize=8)
    axes.set_yticks(places, [work for work, _, _ in bars], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(1.0, 1000.0)
    axes.set_xticks([1.0, 10.0, 100.0], ["1", "10", "100"])
    axes.set_xlabel("times as fast as the other platform")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    plt.close(figure)
