"""Plugins in a file of a test's own folder: a rule, a policy and a codec, which may also fail."""

from __future__ import annotations

from pathlib import Path

from fedplat.loaded_plugins import LoadedPlugins, load_plugins

SOURCE = '''
import msgspec
import numpy as np
from fedplat.aggregate import server_optimizer, weighted_mean
from fedplat.codecs import Codec
from fedplat.model import blocks


class Scaled(msgspec.Struct, frozen=True):
    """The mean times a factor, plus its own last step."""

    factor: float = 2.0
    fails: str = ""
    works_on_mean = True

    def build(self):
        def init(size):
            return {"last": np.zeros(size, np.float32)}

        def update(state, mean):
            step = np.float32(self.factor) * mean + state["last"]
            if self.fails == "raises":
                raise KeyError("momentum")
            if self.fails == "short":
                step = step[:1]
            if self.fails == "nan":
                step = step * np.float32("nan")
            return step, {"last": step}

        return server_optimizer(init, update)(weighted_mean())


class Labelled(msgspec.Struct, frozen=True):
    """Draw the clients whose label `first` is "yes", then the others."""

    fails: str = ""

    def draw(self, candidates, count, rng):
        if self.fails == "raises":
            raise KeyError("utility")
        if self.fails == "twice":
            return [0, 0]
        labels = candidates.values_of("first")
        return sorted(range(len(candidates)), key=lambda index: labels[index] != "yes")[:count]


class Halves(msgspec.Struct, frozen=True):
    """16-bit floats."""

    fails: str = ""

    def build(self):
        def write(vector, rng):
            return (block.astype("<f2").tobytes() for block in vector)

        def read(source, size):
            for part in blocks(size):
                block = np.frombuffer(source.take(2 * (part.stop - part.start)), "<f2").astype(np.float32)
                if self.fails == "raises" and block[0] > 100:
                    raise KeyError("exponent")
                yield block[1:] if self.fails == "short" and block[0] > 100 else block

        return Codec(write=write, read=read, max_bytes=lambda size: 2 * size)
'''
NAMES = {"rules.scaled": "Scaled", "policies.labelled": "Labelled", "codecs.halves": "Halves"}
"""The plugins of the file, and their classes."""


def write_file(folder: Path, addition: str = "", name: str = "own.py") -> Path:
    """Write the file; with another `addition` its digest is another one."""
    path = folder / name
    path.write_text(SOURCE + addition)
    return path


def options(path: Path, *labels: str) -> list[str]:
    """The options of a command that name the plugins of the file; some of them only, if `labels` are given."""
    return [part for label in labels or NAMES for part in ("--plugin", f"{label}={path}:{NAMES[label]}")]


def load(path: Path, *labels: str) -> LoadedPlugins:
    """The plugins of the file, imported here. Python imports a file once; a changed one needs another path."""
    return load_plugins({label: f"{path}:{NAMES[label]}" for label in labels or NAMES})
