"""The model of a silo in a decentralised job: trained, announced, mixed, and replaced by means.

Each method that changes something first stores what is new durably, then the silo's state, so that a crash leaves the
silo before it or after it. The numbers are those of `fedplat.gossip`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import structs

from fedplat.codecs import Codec
from fedplat.errors import CodecError, GossipError
from fedplat.gossip import combine, compress, files, follow, mix
from fedplat.gossip.fixed_point import find_largest
from fedplat.gossip.messages import Announcement, CommitRow, Delta
from fedplat.gossip.steps import Contact, ExchangeSetup, Offered
from fedplat.model import FLOATING, Parameters, Vector
from fedplat.secure_aggregation.messages import KEY_BYTES
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import RelayKey
from fedplat_client._state.silo_store import PendingMean, RelaySecret, SiloFolder, SiloState

_logger = logging.getLogger(__name__)


class SiloModel:
    """The model of one job; `initial` is the model with which all silos begin, `codec` that of compressed gossip."""

    def __init__(self, folder: SiloFolder, initial: Parameters, setup: ExchangeSetup, codec: Codec | None) -> None:
        """Begin with the initial model unless the folder has one. Raises `OSError`."""
        self._folder = folder
        self._initial = initial
        self._codec = codec
        self._gamma = 1.0 if setup.gamma is None else setup.gamma
        self.is_directed = setup.exchange == "push-sum"
        self.is_ring = setup.exchange == "ring"
        self.size = initial.schema.num_floating
        if not self.state.model:
            vector = initial.to_vector()
            first = files.make_sum_file(vector.astype(np.float64), 1.0) if self.is_directed else self._plain(vector)
            digest = folder.put(first)
            copy = digest if codec is not None else ""
            self._save(initial=folder.put(initial), model=digest, copy=copy)

    @property
    def state(self) -> SiloState:
        """What the silo has done."""
        return self._folder.state

    @property
    def mean_bytes(self) -> int:
        """The size of the file of a mean."""
        return self._initial.schema.file_size_bytes

    @property
    def file_bytes(self) -> int:
        """The size of a neighbour's file."""
        return files.file_bytes(self.size, directed=self.is_directed)

    def vector(self) -> Vector:
        """Return the silo's model, float32 [entries]; with push-sum the sum divided by the weight."""
        if not self.is_directed:
            return files.read_model_file(self.path(self.state.model), self.size)
        total, weight = files.read_sum_file(self.path(self.state.model), self.size)
        return (total / weight).astype(np.float32)

    def begin_training(self) -> Parameters:
        """Return a copy of the silo's model for a trainer."""
        carried = Parameters.open(self.path(self.state.carried)) if self.state.carried else self._initial
        return files.replace_entries(carried, self.vector())

    def add_update(self, update: Parameters) -> str:
        """Store the model with the update of a training, and return its digest, for `finish_training`.

        Raises `GossipError` if it has NaN or infinite entries.
        """
        step = update.to_vector()
        if not np.isfinite(step).all():
            raise GossipError("the trainer's result has NaN or infinite entries")
        if self.is_directed:
            total, weight = files.read_sum_file(self.path(self.state.model), self.size)
            trained = files.make_sum_file(total + step, weight)
        else:
            trained = self._plain(self.vector() + step)
        return self._folder.put(trained)

    def finish_training(
        self, digest: str, token: str, update: Parameters, num_examples: float, metrics: Mapping[str, float]
    ) -> None:
        """Make a trained model the silo's; `token` is that of the assignment, and `update` has its other entries."""
        carried = ""
        if any(run.dtype not in FLOATING for run in update.schema.segments):
            carried = self._folder.put(update)
        self._save(
            is_trained=True,
            trained_token=token,
            model=digest,
            carried=carried,
            num_examples=num_examples,
            metrics=dict(metrics),
        )

    def prepare(self, round_number: int, rng: np.random.Generator) -> None:
        """Make the model ready for neighbours in a round; with a codec as one more step of the public copy."""
        state = self.state
        if state.prepared == round_number:
            return
        bytes_now = state.sent_bytes, state.received_bytes
        changes: dict[str, object] = {
            "prepared": round_number,
            "stored": dict[str, str](),
            "announced_bytes": bytes_now,
            "round_bytes": (bytes_now[0] - state.announced_bytes[0], bytes_now[1] - state.announced_bytes[1]),
        }
        if self._codec is not None:
            if state.mixed_round < state.prepared:
                changes["followers"] = ()  # who has the last copy is not known
            copy = self._read_copy(state.copy)
            payload, following = compress(self._codec, self.vector(), copy, rng)
            delta = Delta(self._folder.put(payload), len(payload), state.copy)
            changes |= {"copy": self._folder.put(self._plain(following)), "delta": delta}
        self._save(**changes)

    def relay_key(self, round_number: int, attempt: int) -> KeyPair:
        """Return the silo's key pair for files through the server in an attempt: the same one after a restart."""
        stored = self.state.relay
        if stored is None or (stored.round, stored.attempt) != (round_number, attempt):
            stored = RelaySecret(round_number, attempt, os.urandom(KEY_BYTES))
            self._save(relay=stored)
        return KeyPair(stored.secret)

    def describe(self, address: str, key: RelayKey) -> Announcement:
        """Return what the silo announces of its model."""
        vector = self.vector().astype(np.float64)
        return Announcement(
            digest=self.announced,
            size_bytes=self.path(self.announced).stat().st_size,
            address=address,
            num_examples=self.state.num_examples,
            squared_norm=float(vector @ vector),
            delta=self.state.delta,
            relay_key=key.encryption_key,
            relay_signature=key.signature,
        )

    @property
    def announced(self) -> str:
        """The digest of the file that neighbours get."""
        return self.state.copy if self._codec is not None else self.state.model

    def list_files(self, receivers: Sequence[Contact]) -> list[tuple[str, Sequence[Contact]]]:
        """Return the digest of the file that each silo needs, with those that need it.

        With a codec it is the step to the public copy for those that have the copy before, and the whole copy for the
        others.
        """
        delta, followers = self.state.delta, self.state.followers
        if delta is None:
            return [(self.announced, receivers)]
        following = [each for each in receivers if followers is None or each.silo in followers]
        return [(delta.digest, following), (self.announced, [each for each in receivers if each not in following])]

    def adopted_mean(self) -> str:
        """Return the digest of the last mean that all silos may have from this one; "" if it has none."""
        mean = self.state.mean
        return mean.digest if mean is not None and mean.round == self.state.adopted_round else ""

    def largest(self) -> float:
        """Return the largest magnitude of an entry."""
        return find_largest(self.vector())

    # --- neighbours ------------------------------------------------------------------------------------------

    def find(self, digest: str) -> Path | None:
        """Return the path of a file; None if the silo does not have it."""
        return self._folder.find(digest)

    def path(self, digest: str) -> Path:
        """Return the path of a file that the silo has."""
        path = self._folder.find(digest)
        assert path is not None, "the state names a file that is missing"
        return path

    def rebuild(self, offered: Offered, payload: Path) -> Path:
        """Return the file of a neighbour's public copy, made of the one before and a step.

        Raises `GossipError` if it is not the announced one.
        """
        delta, base = offered.delta, self._folder.find(offered.delta.base) if offered.delta is not None else None
        if self._codec is None or delta is None or base is None:
            raise GossipError("the neighbour's last public copy is not there")
        try:
            copy = follow(self._codec, files.read_model_file(base, self.size), payload.read_bytes())
        except CodecError as exc:
            raise GossipError(f"the neighbour's step cannot be decoded: {exc}") from exc
        digest = self._folder.put(self._plain(copy))
        if digest != offered.digest:
            raise GossipError(f"the neighbour's step leads to a file with the digest {digest}")
        return self.path(digest)

    def store(self, sender: str, digest: str, path: Path) -> float:
        """Store a neighbour's verified file; return the squared distance of its model from the silo's.

        Raises `GossipError` if it is no model of the job.
        """
        path = self._folder.find(digest) or path
        if self.is_directed:
            total, weight = files.read_sum_file(path, self.size)
            own, own_weight = files.read_sum_file(self.path(self.state.model), self.size)
            away = total / weight - own / own_weight
        else:
            away = files.read_model_file(path, self.size) - self._read_copy(self.announced).astype(np.float64)
        if self._folder.find(digest) is None:  # another neighbour may have the same model
            self._folder.admit(path, digest)
        self._save(stored={**self.state.stored, sender: digest})
        return float(away @ away)

    def mix(self, row: CommitRow) -> bool:
        """Mix the silo's model with the stored ones; return False if they are lost, and the model stays as it is."""
        if self.state.mixed_round >= row.round:
            return True
        stored = [(weight, self.state.stored.get(name, "")) for name, weight in row.neighbours]
        is_complete = all(digest and self._folder.find(digest) is not None for _, digest in stored)
        changes: dict[str, object] = {"mixed_round": row.round, "is_trained": False, "stored": dict[str, str]()}
        changes["followers"] = tuple(name for name, _ in row.neighbours)
        if is_complete and stored:
            mixed = self._mix_sums(row, stored) if self.is_directed else self._mix_models(stored)
            changes["model"] = self._folder.put(mixed)
        elif self.is_directed and row.own < 1.0 and is_complete:
            changes["model"] = self._folder.put(self._mix_sums(row, stored))
        self._save(**changes)
        # Neighbours' public copies are the bases of their next steps.
        self._folder.keep_only(*(digest for _, digest in stored if self._codec is not None))
        return is_complete

    def _mix_models(self, stored: list[tuple[float, str]]) -> Parameters:
        neighbours = [(weight, self._read_copy(digest)) for weight, digest in stored]
        return self._plain(mix(self.vector(), neighbours, self._read_copy(self.announced), self._gamma))

    def _mix_sums(self, row: CommitRow, stored: list[tuple[float, str]]) -> Parameters:
        total, weight = files.read_sum_file(self.path(self.state.model), self.size)
        others = [(share, *files.read_sum_file(self.path(digest), self.size)) for share, digest in stored]
        mixed, mass = combine((row.own, total, weight), others)  # type: ignore[arg-type] -- sums are float64
        return files.make_sum_file(mixed.astype(np.float64, copy=False), mass)

    # --- means -----------------------------------------------------------------------------------------------

    def take_mean(self, mean: Vector, round_number: int, attempt: int, chunks: tuple[str, ...]) -> PendingMean:
        """Store the mean of an attempt at a ring, and return it. Raises `GossipError` if it is no model of the job."""
        digest = self._folder.put(files.make_mean_file(self._initial, mean))
        away = self.vector().astype(np.float64) - mean
        pending = PendingMean(round_number, attempt, digest, float(away @ away), chunks)
        self._save(mean=pending)
        return pending

    def check_mean(self, path: Path) -> None:
        """Raise `GossipError` unless a file is a model of the job."""
        found = Parameters.open(path)
        if (difference := found.schema.difference_from(self._initial.schema)) or not found.is_finite():
            raise GossipError(f"the mean is no model of this job: {difference or 'it is not finite'}")

    def adopt(self, mean: Path, digest: str, round_number: int) -> None:
        """Replace the silo's model by a mean, of which the file is verified."""
        vector = Parameters.open(mean).to_vector()
        file = files.make_sum_file(vector.astype(np.float64), 1.0) if self.is_directed else self._plain(vector)
        if self._folder.find(digest) is None:
            self._folder.admit(mean, digest)
        pending = self.state.mean
        if pending is None or pending.digest != digest:
            pending = PendingMean(round_number, 0, digest, 0.0, ())
        changes: dict[str, object] = {"model": self._folder.put(file), "adopted_round": round_number, "mean": pending}
        if self.is_ring:
            changes |= {"mixed_round": round_number, "is_trained": False}
        self._save(**changes)
        self._folder.keep_only()

    def count_bytes(self, sent: int, received: int) -> None:
        """Add bytes of models that were sent and received."""
        if sent or received:
            total_sent, total_received = self.state.sent_bytes + sent, self.state.received_bytes + received
            self._save(sent_bytes=total_sent, received_bytes=total_received)

    def _save(self, **changes: object) -> None:
        self._folder.save(structs.replace(self.state, **changes))

    def _read_copy(self, digest: str) -> Vector:
        return files.read_model_file(self.path(digest), self.size)

    def _plain(self, vector: Vector) -> Parameters:
        return files.make_model_file(vector)
