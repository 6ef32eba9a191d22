"""The data: plays of Shakespeare, character by character, of which the server and two silos have different parts.

The file `tinyshakespeare.txt` is in the folder of well-known data sets (`FEDPLAT_DATA`, or `../shared/data`). Without
it, its beginning is used, which is part of the example.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from torch.utils.data import TensorDataset

from fedplat.errors import DataError
from fedplat.pytorch.server import pack_sequences
from fedplat.simulation.data.sources.common import FOLDER_VARIABLE, character_codes, data_folder

EXCERPT = Path(__file__).resolve().parent / "excerpt.txt"
PARTS = {"server": 0.5, "sharded": 0.2, "pipelined": 0.2, "held out": 0.1}
"""The share of each part, in the order of the text."""


def find_text() -> Path:
    """Return the path of the plays, or of their beginning."""
    path = data_folder() / "tinyshakespeare.txt"
    return path.absolute() if path.is_file() else EXCERPT


def read_text(path: Path, num_characters: int) -> str:
    """Return the first `num_characters`. Raises `DataError` if the text is too short."""
    text = path.read_text("utf-8")
    if len(text) < num_characters:
        raise DataError(
            f"{path} has {len(text):,} characters; expected {num_characters:,}. Set {FOLDER_VARIABLE} to a folder with "
            "a longer tinyshakespeare.txt, or use fewer characters"
        )
    return text[:num_characters]


def load_part(name: str, path: Path, num_characters: int, length: int) -> TensorDataset:
    """Return a part of the first `num_characters`, as rows of `length` characters and those that follow."""
    text = read_text(path, num_characters)
    ends = [round(end * num_characters) for end in itertools.accumulate(PARTS.values(), initial=0.0)]
    place = list(PARTS).index(name)
    return pack_sequences([character_codes(text[ends[place] : ends[place + 1]])], length)
