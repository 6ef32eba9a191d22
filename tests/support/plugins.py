"""Plugins in a file of a test's own folder: a rule, a policy and a codec, which may also fail."""

from __future__ import annotations

from pathlib import Path

from fedplat.config.loaded_plugins import LoadedPlugins, load_plugins

SOURCE = '''
import itertools

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
        if self.fails == "endless":
            return itertools.count()
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
LATE = '''
from pathlib import Path

import msgspec
from fedplat.aggregate import weighted_mean
from fedplat.codecs import Bf16

LEFT = Path(__file__).with_suffix(".left")


def count():
    """Raise once the calls that the file LEFT allows are used up; without the file, all are allowed."""
    if LEFT.exists():
        left = int(LEFT.read_text())
        LEFT.write_text(str(max(left - 1, 0)))
        if not left:
            raise KeyError("the table of a colleague")


class Rule(msgspec.Struct, frozen=True):
    works_on_mean = True

    def build(self):
        count()
        return weighted_mean()


class Codec(msgspec.Struct, frozen=True):
    def build(self):
        count()
        return Bf16().build()


class Policy(msgspec.Struct, frozen=True):
    @property
    def remembers(self):
        count()
        return False

    def draw(self, candidates, count, rng):
        return list(range(len(candidates)))[:count]


class Weight(msgspec.Struct, frozen=True):
    def weight(self, staleness):
        count()
        return 1.0
'''
"""A rule, a codec, a policy and a staleness weight that work for a while; `allow_calls` sets for how long."""
LATE_NAMES = {"rules.late": "Rule", "codecs.late": "Codec", "policies.late": "Policy", "staleness.late": "Weight"}
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


def load_late(folder: Path) -> LoadedPlugins:
    """The plugins of `LATE`, in a file of this folder."""
    path = folder / "late.py"
    path.write_text(LATE)
    return load_plugins({label: f"{path}:{name}" for label, name in LATE_NAMES.items()})


def allow_calls(folder: Path, count: int | None) -> None:
    """Let the plugins of `load_late` raise after so many calls; None: never."""
    left = folder / "late.left"
    left.unlink(missing_ok=True) if count is None else left.write_text(str(count))
