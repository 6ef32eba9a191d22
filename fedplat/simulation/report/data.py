"""Who has which data, as numbers and as a few lines of text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedplat.simulation.data import Federation

MAX_LABELS = 100
"""Tables of more labels than these have nothing to show in a terminal."""
_SHADES = " ░▒▓█"


def label_table(federation: Federation) -> npt.NDArray[np.int64]:
    """How many examples of each label (columns) each client (rows) has; one column where targets are no labels."""
    targets = federation.targets
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        return federation.sizes()[:, None]
    labels, codes = np.unique(targets, return_inverse=True)
    return np.array([np.bincount(codes[part], minlength=len(labels)) for part in federation.parts])


def facts(federation: Federation) -> dict[str, float]:
    """Sizes and labels in numbers.

    `skew` is the mean over clients of the total-variation distance between a client's labels and those of all: 0 where
    all clients are alike, towards 1 where each has labels of its own.
    """
    sizes, table = federation.sizes(), label_table(federation)
    shares = table / table.sum(axis=1, keepdims=True)
    overall = table.sum(axis=0) / table.sum()
    return {
        "clients": float(len(sizes)),
        "examples": float(sizes.sum()),
        "unused": float(len(federation.inputs) - sizes.sum()),
        "held_out": float(len(federation.test_inputs)),
        "smallest": float(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": float(sizes.max()),
        "labels": float(table.shape[1]),
        "labels_per_client": float((table > 0).sum(axis=1).mean()),
        "skew": float(np.abs(shares - overall).sum(axis=1).mean() / 2),
    }


def lines(federation: Federation, width: int) -> list[str]:
    """The same for people, with a picture of labels (rows) by clients (columns), of at most `width` characters."""
    found, table = facts(federation), label_table(federation)
    text = [
        f"{found['clients']:,.0f} clients with {found['smallest']:,.0f} to {found['largest']:,.0f} examples "
        f"(median {found['median']:,.0f}), {found['examples']:,.0f} in all; {found['unused']:,.0f} are nobody's, "
        f"{found['held_out']:,.0f} held out",
    ]
    if not 1 < table.shape[1] <= MAX_LABELS:
        return text
    text.append(
        f"{found['labels']:.0f} labels, {found['labels_per_client']:.3g} on average with each client; "
        f"skew {found['skew']:.2f} (0: all clients are alike)"
    )
    columns = np.unique(np.linspace(0, len(table) - 1, min(len(table), max(1, width - 8))).astype(np.int64))
    shares = table[columns] / table[columns].sum(axis=1, keepdims=True)
    darkness = np.ceil(shares / shares.max() * (len(_SHADES) - 1)).astype(np.int64)
    text += [f"{label:>6}  " + "".join(_SHADES[shade] for shade in row) for label, row in enumerate(darkness.T)]
    text.append(
        f"{'label':>6}  "
        + ("each column is a client" if len(columns) == len(table) else f"{len(columns)} of the clients")
    )
    return text
