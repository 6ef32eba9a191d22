"""Shakespeare's plays: each speaker is a client that predicts the next character (McMahan et al. 2017, section 3).

As in LEAF (Caldas et al. 2018, arXiv 1812.01097) an example is 80 characters of one speaker's lines and the next
character; the last part of each speaker's lines is held out.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import numpy as np

from fedplat.errors import DataError
from fedplat.simulation.data.federation import Array, Dataset, Part
from fedplat.simulation.data.sources import common
from fedplat.simulation.data.sources.common import Fraction, SourcePaths, find_data_file

_HOW_TO_GET = "It has the text of the plays: a line with the speaker's name and a colon, the speech, an empty line."
_SPEECH = re.compile(r"^([^\n:]{1,60}):\n(.+?)(?=\n\n|\n*\Z)", re.MULTILINE | re.DOTALL)


class Shakespeare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="shakespeare"):
    """Inputs are uint8 codes [n, length] (see `common.CHARACTERS`), targets the next character's code as int64 [n].

    A new example begins every `stride` characters. Speakers with fewer than `min_examples` of them are left out.
    """

    length: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 80
    stride: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    min_examples: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 20
    test_fraction: Fraction = 0.2

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError` if the file is missing, or no speaker has `min_examples`."""
        path = find_data_file(place.data, "tinyshakespeare.txt", _HOW_TO_GET)
        speeches: dict[str, list[str]] = {}
        for speaker, speech in _SPEECH.findall(path.read_text("utf-8")):
            speeches.setdefault(speaker, []).append(speech)
        train: list[tuple[Array, Array]] = []
        test: list[tuple[Array, Array]] = []
        names: list[str] = []
        for speaker in sorted(speeches):
            inputs, targets = self._examples("\n".join(speeches[speaker]))
            if len(inputs) < self.min_examples:
                continue
            names.append(speaker)
            kept = len(inputs) - round(self.test_fraction * len(inputs))
            train.append((inputs[:kept], targets[:kept]))
            # The first held-out example begins after the last training example has ended: they do not overlap.
            begin = min(len(inputs), kept + -(-self.length // self.stride))
            test.append((inputs[begin:], targets[begin:]))
        if not names:
            raise DataError(f"no speaker in {path} has {self.min_examples} examples of {self.length} characters")
        sizes = np.array([len(inputs) for inputs, _ in train])
        return Dataset(*_concatenate(train), *_concatenate(test), _owners(sizes), tuple(names))

    def _examples(self, lines: str) -> tuple[Array, Array]:
        characters = common.character_codes(lines)
        if len(characters) <= self.length:
            return characters[:0].reshape(0, self.length), characters[:0].astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(characters, self.length + 1)[:: self.stride]
        return windows[:, :-1], windows[:, -1].astype(np.int64)


def _concatenate(pairs: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([inputs for inputs, _ in pairs]), np.concatenate([targets for _, targets in pairs])


def _owners(sizes: Array) -> Part:
    return np.repeat(np.arange(len(sizes)), sizes).astype(np.int64)
