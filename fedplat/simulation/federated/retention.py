"""Updates that were folded and may be folded again: in memory up to a budget, then in one temporary file each."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from fedplat.model import ModelFile, Parameters, Values

MEMORY_BYTES = 256 * 2**20
"""Bytes of updates that stay in memory."""


class UpdateRetention:
    """Stores the updates of open attempts. Encoded updates are small and always stay in memory."""

    def __init__(self, budget: int = MEMORY_BYTES) -> None:
        self._left = budget
        self._folder: Path | None = None
        self._number = 0

    def keep(self, values: Values) -> Values:
        """Return the same values, in memory or in a file."""
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
        """Free values that `keep` returned."""
        if isinstance(kept, Parameters):
            self._left += kept.schema.file_size_bytes
        elif isinstance(kept, ModelFile):
            Path(kept.path).unlink(missing_ok=True)
