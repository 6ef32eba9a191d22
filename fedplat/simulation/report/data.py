"""The distribution of data over clients, as numbers and as a few lines of text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedplat.simulation.data import Federation

MAX_LABELS = 100
"""The largest number of labels whose table is readable in a terminal."""
_NAME_WIDTH = 24
_SHADES = " ░▒▓█"


def label_table(federation: Federation) -> npt.NDArray[np.int64]:
    """Count the examples of each client by label: [clients, labels], or [clients, 1] if targets are not labels."""
    targets = federation.targets
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        return federation.sizes()[:, None]
    labels, codes = np.unique(targets, return_inverse=True)
    return np.array([np.bincount(codes[part], minlength=len(labels)) for part in federation.parts])


def facts(federation: Federation) -> dict[str, float]:
    """Return statistics of the sizes and labels.

    `skew` is the mean over clients of the total-variation distance between a client's labels and those of all: 0 if all
    clients are alike, towards 1 if each client has different labels.
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
    """Describe the data in lines of at most `width` characters, with a chart of labels (rows) by clients (columns)."""
    numbers, table = facts(federation), label_table(federation)
    text = [
        f"{numbers['clients']:,.0f} clients with {numbers['smallest']:,.0f} to {numbers['largest']:,.0f} examples "
        f"(median {numbers['median']:,.0f}), {numbers['examples']:,.0f} in all; {numbers['unused']:,.0f} are unused, "
        f"{numbers['held_out']:,.0f} held out",
    ]
    if not 1 < table.shape[1] <= MAX_LABELS:
        return text
    text.append(
        f"{numbers['labels']:.0f} labels, {numbers['labels_per_client']:.3g} on average with each client; "
        f"skew {numbers['skew']:.2f} (0: all clients are alike)"
    )
    names = _label_names(federation, table.shape[1])
    indent = max(6, *map(len, names))
    columns = np.unique(np.linspace(0, len(table) - 1, min(len(table), max(1, width - indent - 2))).astype(np.int64))
    shares = table[columns] / table[columns].sum(axis=1, keepdims=True)
    darkness = np.ceil(shares / shares.max() * (len(_SHADES) - 1)).astype(np.int64)
    rows = ["".join(_SHADES[shade] for shade in row) for row in darkness.T]
    text += [f"{name:>{indent}}  {row}" for name, row in zip(names, rows, strict=True)]
    text.append(
        f"{'label':>{indent}}  "
        + ("each column is a client" if len(columns) == len(table) else f"{len(columns)} of the clients")
    )
    return text


def _label_names(federation: Federation, count: int) -> list[str]:
    """Return the names of the labels that occur, shortened; their numbers, if the data has no names."""
    labels = np.unique(federation.targets)
    if len(federation.classes) <= labels[-1]:
        return [str(label) for label in range(count)]
    return [federation.classes[label][:_NAME_WIDTH] for label in labels]
