"""Characters as numbers, for models of the next character."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedplat.errors import DataError

CHARACTERS = "\x00 \n!\"$&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz|{}>\ufffd"
"""LEAF's alphabet and the line's end; the first one stands for nothing (padding), the last for every other one."""
_OTHER = len(CHARACTERS) - 1
_CODES = np.full(0x110000, _OTHER, np.uint8)
for _code, _character in enumerate(CHARACTERS):
    _CODES[ord(_character)] = _code


def codes(text: str) -> npt.NDArray[np.uint8]:
    """Each character's place in `CHARACTERS`."""
    return _CODES[np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)]


def code_rows(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Texts of one length as rows of codes. Raises `DataError` where their lengths differ."""
    lengths = {len(text) for text in texts}
    if len(lengths) > 1:
        raise DataError(f"texts have {min(lengths)} to {max(lengths)} characters; expected all of one length")
    return codes("".join(texts)).reshape(len(texts), -1)
