"""Residuals: what a codec left out of a job's updates, stored in the client's data folder and added to the next one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedplat.model import Vector
from fedplat_client._state import lru
from fedplat_client._state.two_phase import SentReport, TwoPhaseFiles, WasMerged


class Residuals:
    """A folder with the residuals of all jobs, at most `limit_bytes` in size. Methods raise `OSError`."""

    def __init__(self, folder: Path, limit_bytes: int, give_way: lru.GiveWay = lambda: False) -> None:
        self._files = TwoPhaseFiles(folder, limit_bytes, "A residual", give_way)
        self.forget = self._files.forget

    def load(self, job_id: str, format: str, size: int, merged: WasMerged) -> Vector | None:
        """Return the residual of a job, float32 [size], or None; `format` identifies the job's codec and schema."""
        data = self._files.commit(job_id, f"{format} {size}", merged)
        if data is None or len(data) != 4 * size:
            return None
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)

    def stage(self, job_id: str, format: str, sent: SentReport, residual: Vector) -> bool:
        """Store the residual of an update before it is reported; return False if it exceeds the limit."""
        data = residual.astype("<f4", copy=False).data.cast("B")
        return self._files.stage(job_id, f"{format} {residual.size}", sent, data)
