"""Draw docs/images/home.svg, the picture of the home page, from a simulation.

    python docs/site/home_picture.py

Left: what each client of `fedplat simulate digits` has, its examples of each digit. Right: the accuracy of the one
model on held-out examples after each round. The colours work on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedplat import simulate

PICTURE = Path(__file__).resolve().parents[1] / "images" / "home.svg"
WIDTH, HEIGHT = 760, 300
COLUMNS, CELL, TOP = 10, 34, 62
DIGITS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
LINE, GREY = "#3b82c4", "#808890"
PLOT = (445, 62, 295, 178)
"""Left, top, width and height of the curve's area."""


def draw(shares: Sequence[Sequence[int]], accuracy: Sequence[float]) -> str:
    """Return the picture: `shares[i][k]` are client i's examples of label k, `accuracy` the value after each round."""
    parts = [*_texts(len(shares), accuracy), *_clients(shares), *_curve(accuracy)]
    style = f"text{{font:13px sans-serif;fill:{GREY}}}.h{{font-weight:bold;font-size:14px}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="The data of '
        f'{len(shares)} simulated clients, and the accuracy of their common model">\n<style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _texts(num_clients: int, accuracy: Sequence[float]) -> Iterator[str]:
    left, top, width, height = PLOT
    yield f'<text class="h" x="20" y="26">The data of {num_clients} clients stays where it is</text>'
    yield '<text x="20" y="45">a circle is a client, a colour one of ten digits</text>'
    yield f'<text class="h" x="{left}" y="26">One model learns from all of them</text>'
    yield f'<text x="{left}" y="45">accuracy on held-out digits, by round</text>'
    yield f'<text x="{left + width}" y="{top + height + 20}" text-anchor="end">round {len(accuracy)}</text>'
    yield f'<text x="{left}" y="{top + height + 20}">1</text>'
    yield f'<text x="{left + width}" y="{HEIGHT - 12}" text-anchor="end">made by: fedplat simulate digits</text>'


def _clients(shares: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield a pie for each client, with an area in proportion to its examples."""
    most = max(map(sum, shares))
    for number, counts in enumerate(shares):
        row, column = divmod(number, COLUMNS)
        centre = (20 + CELL // 2 + column * (CELL + 2), TOP + CELL // 2 + row * (CELL + 8))
        radius = CELL / 2 * math.sqrt(sum(counts) / most)
        yield from _pie(centre, radius, counts)


def _pie(centre: tuple[int, int], radius: float, counts: Sequence[int]) -> Iterator[str]:
    x, y = centre
    if sum(1 for count in counts if count) == 1:
        label = next(k for k, count in enumerate(counts) if count)
        yield f'<circle cx="{x}" cy="{y}" r="{radius:.1f}" fill="{DIGITS[label]}"/>'
        return
    angle = -math.pi / 2
    for label, count in enumerate(counts):
        if not count:
            continue
        after = angle + 2 * math.pi * count / sum(counts)
        points = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in (angle, after)]
        (x1, y1), (x2, y2) = points
        large = int(after - angle > math.pi)
        path = f"M{x} {y}L{x1:.1f} {y1:.1f}A{radius:.1f} {radius:.1f} 0 {large} 1 {x2:.1f} {y2:.1f}Z"
        yield f'<path d="{path}" fill="{DIGITS[label]}"/>'
        angle = after


def _curve(accuracy: Sequence[float]) -> Iterator[str]:
    left, top, width, height = PLOT
    for percent in (0, 25, 50, 75, 100):
        y = top + height * (1 - percent / 100)
        yield f'<path d="M{left} {y:.1f}h{width}" stroke="{GREY}" stroke-opacity=".3"/>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    step = width / max(1, len(accuracy) - 1)
    points = " ".join(f"{left + n * step:.1f},{top + height * (1 - value):.1f}" for n, value in enumerate(accuracy))
    yield f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2.5"/>'
    y = top + height * (1 - accuracy[-1])
    yield f'<circle cx="{left + width}" cy="{y:.1f}" r="4" fill="{LINE}"/>'
    yield f'<text x="{left + width}" y="{y - 10:.1f}" text-anchor="end">{accuracy[-1]:.0%}</text>'


def main() -> None:
    """Simulate, and write the picture."""
    run = simulate("digits", progress=False)
    federation = run.federation
    assert federation is not None
    shares = [np.bincount(federation.examples(n)[1], minlength=10).tolist() for n in range(federation.num_clients)]
    PICTURE.write_text(draw(shares, run.series().values.tolist()), "utf-8")


if __name__ == "__main__":
    main()
