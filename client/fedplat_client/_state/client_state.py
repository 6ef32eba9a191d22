"""The client state of each job (`task.client_state`), stored between rounds in the client's data folder.

A lost control variate, or one kept although its update was not merged, would silently make the job's result wrong. So
an assignment fails if its client state cannot be stored.
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
from fedplat_client._state import lru
from fedplat_client._state.two_phase import SentReport, TwoPhaseFiles, WasMerged

_FORMAT = "memory"
_logger = logging.getLogger(__name__)


class ClientStateStore:
    """A folder with the client states of all jobs, at most `limit_bytes` in size."""

    def __init__(self, folder: Path, limit_bytes: int, give_way: lru.GiveWay = lambda: False) -> None:
        self._files = TwoPhaseFiles(folder, limit_bytes, "A client state", give_way)

    def open(self, job_id: str, merged: WasMerged, *, training: bool) -> ClientState:
        """Return the client state of a job. An evaluation reads the state without changing the files."""
        try:
            read = self._files.commit if training else self._files.peek
            data = read(job_id, _FORMAT, merged)
            return ClientState({} if data is None else _unpack_notes(Parameters.from_bytes(data)))
        except (OSError, ModelError) as exc:  # most trainers have no state; for the others `stage` fails, too
            _logger.warning("The client state of the job cannot be read: %s", exc, extra={"job": job_id})
            return ClientState()

    def stage(self, job_id: str, sent: SentReport, client_state: ClientState) -> bool:
        """Store the client state before the update is reported; return False if it exceeds the limit.

        If the trainer changed nothing, the stored state stays valid. Raises `OSError`.
        """
        if not client_state.changed:
            return True
        return self._files.stage(job_id, _FORMAT, sent, _pack_notes(client_state.contents).to_bytes())


def _pack_notes(notes: Mapping[str, Parameters]) -> Parameters:
    """Pack all notes into one file with tensors named NOTE/TENSOR; a note's name contains no slash."""
    arrays: dict[str, npt.NDArray[Any]] = {
        f"{note}/{name}": array for note, values in notes.items() for name, array in values.items()
    }
    return Parameters.from_arrays(arrays)


def _unpack_notes(packed: Parameters) -> dict[str, Parameters]:
    notes: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, array in packed.items():
        note, _, name = key.partition("/")
        notes.setdefault(note, {})[name] = array
    return {note: Parameters.from_arrays(arrays) for note, arrays in notes.items()}
