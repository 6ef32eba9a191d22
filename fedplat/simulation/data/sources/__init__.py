"""Sources of examples, as `[simulation.data]` of a simulation file describes.

To add one: write one new file (a frozen record with `load()`), add its record to `Source` and one row to `SOURCES`
below. No source downloads, executes or unpickles a file; only `function` runs code, the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedplat.simulation.data.sources.digits import Digits
from fedplat.simulation.data.sources.function import Function
from fedplat.simulation.data.sources.huggingface import HuggingFace
from fedplat.simulation.data.sources.leaf import Leaf
from fedplat.simulation.data.sources.mnist import Mnist
from fedplat.simulation.data.sources.npz import Npz
from fedplat.simulation.data.sources.paths import SourcePaths, data_folder
from fedplat.simulation.data.sources.shakespeare import Shakespeare

Source = Mnist | Shakespeare | Digits | Npz | Function | Leaf | HuggingFace
"""The `[simulation.data]` table; its key `source` selects the source."""

SOURCES: Mapping[str, type[Source]] = {
    "mnist": Mnist,
    "shakespeare": Shakespeare,
    "digits": Digits,
    "npz": Npz,
    "function": Function,
    "leaf": Leaf,
    "huggingface": HuggingFace,
}
"""The options record of each source, by its name in a simulation file."""

__all__ = [
    "SOURCES",
    "Digits",
    "Function",
    "HuggingFace",
    "Leaf",
    "Mnist",
    "Npz",
    "Shakespeare",
    "Source",
    "SourcePaths",
    "data_folder",
]
