"""What trainers remember of their jobs between rounds (`task.client_state`), kept in the client's data folder.

A control variate that is lost, or kept though its update was not merged, would make the job's result wrong without a
word. So an assignment fails if what its trainer remembers cannot be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat_client._state.two_phase import SentReport, TwoPhaseFiles, WasMerged

_FORMAT = "memory"
_logger = logging.getLogger(__name__)


class ClientStateStore:
    """A folder with the memories of all jobs, of at most `limit_bytes`."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._files = TwoPhaseFiles(folder, limit_bytes, "What a trainer remembers of a job")

    def open(self, job_id: str, merged: WasMerged, *, training: bool) -> ClientState:
        """What is remembered of a job. For an evaluation it is only looked at."""
        try:
            look = self._files.commit if training else self._files.peek
            data = look(job_id, _FORMAT, merged)
            return ClientState({} if data is None else _notes(Parameters.from_bytes(data)))
        except (OSError, ModelError) as exc:  # most trainers remember nothing; for the others `keep` fails, too
            _logger.warning("What the trainer remembers of the job cannot be read: %s", exc, extra={"job": job_id})
            return ClientState()

    def stage(self, job_id: str, sent: SentReport, memory: ClientState) -> bool:
        """Stores what is remembered before the update is reported; False if it is beyond the limit. Raises `OSError`.

        Where nothing was written, what was kept before goes on to count.
        """
        if not memory.changed:
            return True
        return self._files.stage(job_id, _FORMAT, sent, _pack_notes(memory.contents).to_bytes())


def _pack_notes(notes: Mapping[str, Parameters]) -> Parameters:
    """All notes as one file, with tensors NOTE/TENSOR; names of notes have no slash."""
    arrays: dict[str, npt.NDArray[Any]] = {
        f"{note}/{name}": array for note, values in notes.items() for name, array in values.items()
    }
    return Parameters.from_arrays(arrays)


def _notes(joined: Parameters) -> dict[str, Parameters]:
    notes: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, array in joined.items():
        note, _, name = key.partition("/")
        notes.setdefault(note, {})[name] = array
    return {note: Parameters.from_arrays(arrays) for note, arrays in notes.items()}
