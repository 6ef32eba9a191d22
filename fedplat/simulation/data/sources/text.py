"""Characters as numbers, for models of the next character."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError

CHARACTERS = "\x00 \n!\"$&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz|{}>\ufffd"
"""LEAF's alphabet and the newline; the first character is padding, the last stands for all other characters."""
_OTHER = len(CHARACTERS) - 1
_CODES = np.full(0x110000, _OTHER, np.uint8)
for _code, _character in enumerate(CHARACTERS):
    _CODES[ord(_character)] = _code


def codes(text: str) -> npt.NDArray[np.uint8]:
    """Return the index of each character in `CHARACTERS`."""
    return _CODES[np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)]


def code_rows(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Encode texts of one length as rows of codes. Raises `DataError` if their lengths differ."""
    lengths = {len(text) for text in texts}
    if len(lengths) > 1:
        raise DataError(f"texts have {min(lengths)} to {max(lengths)} characters; expected all of one length")
    return codes("".join(texts)).reshape(len(texts), -1)
