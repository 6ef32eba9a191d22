"""Updates that were folded and may have to be folded again: in memory, and beyond a budget in a temporary file each."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from fedplat.model import ModelFile, Parameters, Values

MEMORY_BYTES = 256 * 2**20
"""How many bytes of updates stay in memory."""


class VersionRetention:
    """Keeps the updates of open attempts. Encoded ones are small, and stay in memory."""

    def __init__(self, budget: int = MEMORY_BYTES) -> None:
        self._left = budget
        self._folder: Path | None = None
        self._number = 0

    def keep(self, values: Values) -> Values:
        """Return the same values, wherever they are from now on."""
        if not isinstance(values, Parameters):
            return values
        size = values.schema.file_size_bytes
        if size <= self._left:
            self._left -= size
            return values
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedplat-updates-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._number += 1
        path = self._folder / f"{self._number}.safetensors"
        path.write_bytes(values.to_bytes())
        return ModelFile(path, values.schema)

    def drop(self, kept: Values) -> None:
        """Free what `keep` returned."""
        if isinstance(kept, Parameters):
            self._left += kept.schema.file_size_bytes
        elif isinstance(kept, ModelFile):
            Path(kept.path).unlink(missing_ok=True)
