"""The data owner's privacy limit for single examples, and the ledger of the privacy cost so far.

A server requests private steps with a noise level (`config.dp`); the owner's `PrivacyLimit` bounds how many, over all
servers. The ledger is one file for all servers, populations and jobs of a data directory. It is not part of a job's
client state, which is rolled back when an update is not merged: what was computed from the data stays computed. The
ledger is charged for a whole training, and synced to the disk, before the first step is made. Steps that were not made
are refunded afterwards. So a crash at any point counts too many steps, never too few.

Copies of the same data in another data directory are counted there separately. Deleting the ledger, or restoring an old
one, loses the count.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedplat import durable, forks, system
from fedplat.config.decoding import prepare_type
from fedplat.privacy import steps
from fedplat.privacy.steps import StepCharge
from fedplat_client.errors import DataDirectoryError


@dataclass(frozen=True, kw_only=True)
class PrivacyLimit:
    """The owner's limit: all jobs that ever train on the data together cost at most `max_epsilon` at `delta`.

    Protects the presence of one example against an observer of everything that the client ever sends. Raises
    `ValueError` for numbers that are not usable.
    """

    max_epsilon: float
    delta: float
    """Well below one over the number of examples."""
    min_noise_multiplier: float = 0.0
    """Smallest `config.dp_noise_multiplier` that a job may have."""
    required: bool = True
    """True if only private trainings may use the data. If False, other trainings are neither limited nor counted."""
    evaluates: bool = False
    """True if evaluations may use the data although privacy is required; their metrics have no noise."""
    dataset: str = "default"
    """Name that the cost is counted under: trainers with separate data may each have their own."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_epsilon) and self.max_epsilon > 0):
            raise ValueError(f"max_epsilon is {self.max_epsilon}; expected a number above 0")
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"delta is {self.delta}; expected a number between 0 and 1, such as 1e-5")
        if not (math.isfinite(self.min_noise_multiplier) and self.min_noise_multiplier >= 0):
            raise ValueError(f"min_noise_multiplier is {self.min_noise_multiplier}; expected 0 or more")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of one job to one dataset."""

    dataset: str
    job: str
    charges: list[StepCharge]


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entries: list[_Entry]


class PrivacyLedger:
    """The ledger of a data directory, in a file; without a path in memory, for tasks that are created by hand.

    Job ids are unique within `scope`. Raises `DataDirectoryError` if the file cannot be used: then nothing may be
    computed from the data.
    """

    def __init__(self, path: Path | None = None, scope: str = "") -> None:
        self._path, self._scope = path, scope
        self._memory = _Content([])

    def charge(
        self, dataset: str, job_id: str, planned: StepCharge, allowed: Callable[[Sequence[StepCharge]], None]
    ) -> None:
        """Record steps that will be made, unless `allowed` raises.

        `allowed` receives all charges of the dataset, including the new ones.
        """
        with self._lock():
            content = self._read()
            after = self._with(
                content, dataset, job_id, steps.merge_charges(self._of(content, dataset, job_id), planned)
            )
            allowed([charge for entry in after.entries if entry.dataset == dataset for charge in entry.charges])
            self._write(after)

    def settle(self, dataset: str, job_id: str, unmade: StepCharge) -> list[StepCharge]:
        """Refund steps that were not made; return what the job has cost the dataset so far."""
        with self._lock():
            content = self._read()
            charges = self._of(content, dataset, job_id)
            if unmade.num_steps:
                charges = steps.drop_charges(charges, unmade)
                self._write(self._with(content, dataset, job_id, charges))
            return charges

    def _of(self, content: _Content, dataset: str, job_id: str) -> list[StepCharge]:
        key = (dataset, self._job(job_id))
        return [charge for entry in content.entries if (entry.dataset, entry.job) == key for charge in entry.charges]

    def _with(self, content: _Content, dataset: str, job_id: str, charges: list[StepCharge]) -> _Content:
        key = (dataset, self._job(job_id))
        others = [entry for entry in content.entries if (entry.dataset, entry.job) != key]
        return _Content([*others, _Entry(*key, charges)])

    def _job(self, job_id: str) -> str:
        return f"{self._scope} {job_id}"

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        """Exclude the other clients of the same data directory."""
        if self._path is None:
            yield
            return
        try:
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | system.O_BINARY, 0o600)
        except OSError as exc:
            raise self._unusable(exc) from exc
        with forks.keep_descriptor(lock):  # its end frees the lock
            system.lock(lock)
            yield

    def _read(self) -> _Content:
        if self._path is None:
            return self._memory
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=prepare_type(_Content))
        except FileNotFoundError:
            return _Content([])
        except OSError as exc:
            raise self._unusable(exc) from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise DataDirectoryError(
                f"{self._path} is damaged ({exc}): the privacy cost so far is unknown, so no private training may "
                "start. Restore the file from the latest backup"
            ) from exc

    def _write(self, content: _Content) -> None:
        if self._path is None:
            self._memory = content
            return
        try:
            durable.write_bytes(self._path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        except OSError as exc:
            raise self._unusable(exc) from exc

    def _unusable(self, exc: OSError) -> DataDirectoryError:
        return DataDirectoryError(
            f"{self._path} cannot be used: {exc}; private training needs a readable and writable ledger"
        )
