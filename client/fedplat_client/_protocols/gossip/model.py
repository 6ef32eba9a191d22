"""The model of a silo in a decentralised job: trained, announced, mixed, and replaced by means.

Each method that changes something first stores its files durably, then the silo's state, so that a crash leaves the
silo before the change or after it. The numbers are those of `fedplat.gossip`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import structs

from fedplat.codecs import Codec
from fedplat.errors import CodecError, GossipError, PluginError, UserCodeError
from fedplat.gossip import combine, compress, follow, messages, mix, mixing, steps
from fedplat.gossip.mixing import find_largest
from fedplat.model import FLOATING, Parameters, Vector
from fedplat_client._state.silo_store import PendingMean, RelaySecret, SiloFolder, SiloState

_ROUNDING = 1e-6
_logger = logging.getLogger(__name__)


class SiloModel:
    """The model of one job; `initial` is the model with which all silos begin, `codec` that of compressed gossip.

    Methods raise `OSError`, and `GossipError` for a model that must not be used.
    """

    def __init__(self, folder: SiloFolder, initial: Parameters, setup: steps.GossipSetup, codec: Codec | None) -> None:
        """Begin with the initial model unless the folder has one."""
        self._folder = folder
        self._initial = initial
        self._codec = codec
        self._gamma = 1.0 if setup.gamma is None else setup.gamma
        self._is_directed = setup.exchange == "push-sum"
        self.is_ring = setup.exchange == "ring"
        self.size = initial.schema.num_floating
        self._initial_copy = ""
        if codec is not None:
            self._initial_copy = folder.put(mixing.make_model_file(initial.to_vector()))
        if not self.state.model:
            self._save(model=self._put(initial.to_vector()), copy=self._initial_copy)

    @property
    def state(self) -> SiloState:
        """The state of the silo, as it is stored."""
        return self._folder.state

    @property
    def file_bytes(self) -> int:
        """The size of a silo's file."""
        return mixing.file_bytes(self.size, directed=self._is_directed)

    @property
    def mean_bytes(self) -> int:
        """The size of a mean's file."""
        return self._initial.schema.file_size_bytes

    def read(self) -> Vector:
        """Return the silo's model, float32 [entries]; with push-sum the sum divided by the weight."""
        if not self._is_directed:
            return self._read_plain(self.state.model)
        total, weight = mixing.read_sum_file(self._path(self.state.model), self.size)
        return (total / weight).astype(np.float32)

    def squared_norm(self) -> float:
        """Return the squared norm of the silo's model."""
        vector = self.read().astype(np.float64)
        return float(vector @ vector)

    def find_largest(self) -> float:
        """Return the largest magnitude of an entry."""
        return find_largest(self.read())

    def to_parameters(self) -> Parameters:
        """Return the silo's model for a trainer, with the other entries of its last training."""
        model = mixing.replace_entries(self._initial, self.read())
        if self.state.carried:
            for name, array in Parameters.open(self._path(self.state.carried)).items():
                model[name] = array
        return model

    def add_update(self, update: Parameters) -> str:
        """Store the model with the update of a training, and return its digest, for `finish_training`."""
        step = update.to_vector()
        try:
            if self._is_directed:
                total, weight = mixing.read_sum_file(self._path(self.state.model), self.size)
                file = mixing.make_sum_file(total + step, weight)
            else:
                with np.errstate(over="ignore"):
                    trained = self.read() + step
                file = mixing.make_model_file(trained)
        except GossipError as exc:
            raise GossipError(f"the trained model cannot be used (has the training diverged?): {exc}") from exc
        return self._folder.put(file)

    def finish_training(
        self, training: str, digest: str, update: Parameters, num_examples: float, metrics: Mapping[str, float]
    ) -> None:
        """Make the trained model with this digest the silo's; `training` identifies the training."""
        floating = {spec.name for spec in update.schema.tensors if spec.dtype in FLOATING}
        others = {name: array for name, array in update.items() if name not in floating}
        self._save(
            is_trained=True,
            training=training,
            model=digest,
            carried=self._folder.put(Parameters.from_arrays(others)) if others else "",
            num_examples=num_examples,
            metrics=dict(metrics),
        )

    def prepare(self, round_number: int, relay: RelaySecret, rng: np.random.Generator) -> None:
        """Make the model ready for neighbours in a round; with a codec as one more step of the public copy.

        `relay` is stored with it, and `rng` draws what the codec draws; it changes nothing the second time.
        """
        state = self.state
        changes: dict[str, object] = {"relay": relay}
        if state.prepared != round_number:
            sent, received = (
                state.num_bytes[0] - state.announced_bytes[0],
                state.num_bytes[1] - state.announced_bytes[1],
            )
            changes |= {"prepared": round_number, "stored": dict[str, str]()}
            changes |= {"announced_bytes": state.num_bytes, "said_bytes": (sent, received)}
            if self._codec is not None:
                changes |= self._compress(self._codec, rng)
        elif state.relay == relay:
            return
        self._save(**changes)

    def _compress(self, codec: Codec, rng: np.random.Generator) -> dict[str, object]:
        state = self.state
        payload, copy = compress(codec, self.read(), self._read_plain(state.copy), rng)
        followers = tuple(state.mixed_with) if state.mixed_round == state.prepared else ()
        return {
            "copy": self._folder.put(mixing.make_model_file(copy)),
            "delta": messages.Delta(self._folder.put(payload), len(payload), state.copy),
            "followers": None if state.copy == self._initial_copy else followers,
        }

    @property
    def announced(self) -> str:
        """The digest of the file that neighbours get."""
        return self.state.copy if self._codec is not None else self.state.model

    def list_offers(self, receiver: str, *, all_files: bool) -> dict[str, Path]:
        """Return what a neighbour may get, by digest: the file, and with a codec the step to it.

        Unless `all_files`, only the one that the neighbour needs, as far as the silo knows.
        """
        offers = {self.announced: self._path(self.announced)}
        delta, followers = self.state.delta, self.state.followers
        if delta is not None and (all_files or followers is None or receiver in followers):
            offers = {delta.digest: self._path(delta.digest)} | (offers if all_files else {})
        return offers

    def find(self, digest: str) -> Path | None:
        """Return a file that the silo has."""
        return self._folder.find(digest)

    def can_follow(self, offered: steps.Offered) -> bool:
        """Return whether the step that a neighbour offers is enough to get its file."""
        delta = offered.delta
        if self._codec is None or delta is None or delta.size_bytes > self.file_bytes:
            return False
        return self._folder.find(delta.base) is not None

    def follow(self, offered: steps.Offered, payload: Path) -> Path:
        """Return the file of a neighbour's public copy, made of the one before and the step in `payload`."""
        assert self._codec is not None
        assert offered.delta is not None
        try:
            copy = follow(self._codec, self._read_plain(offered.delta.base), payload.read_bytes())
        except (CodecError, PluginError, UserCodeError) as exc:
            raise GossipError(f"the neighbour's step cannot be decoded: {exc}") from exc
        digest = self._folder.put(mixing.make_model_file(copy))
        if digest != offered.digest:
            raise GossipError(
                f"the neighbour's step leads to a file with the digest {digest}; expected {offered.digest}"
            )
        return self._path(digest)

    def store(self, sender: str, digest: str, path: Path) -> float:
        """Store a neighbour's file, of which the digest is verified; return the squared distance from the silo's.

        Raises `GossipError` if it is no model of the job.
        """
        path = self._folder.find(digest) or path  # another neighbour may have the same model
        try:
            away = self._subtract(path)
        except FileNotFoundError as exc:
            raise GossipError("another neighbour has announced the same file, which is no model") from exc
        except GossipError:
            self._folder.discard(path)
            raise
        self._folder.admit(path, digest)
        self._save(stored={**self.state.stored, sender: digest})
        return float(away @ away)

    def _subtract(self, path: Path) -> mixing.Sum:
        """Return the difference between a neighbour's model and the silo's: with a codec, of the public copies."""
        if not self._is_directed:
            return mixing.read_model_file(path, self.size) - self._read_plain(self.announced).astype(np.float64)
        total, weight = mixing.read_sum_file(path, self.size)
        own, own_weight = mixing.read_sum_file(self._path(self.state.model), self.size)
        return total / weight - own / own_weight

    def mix(self, row: messages.CommitRow) -> bool:
        """Mix the silo's model with the stored ones; return False if they are lost, and the model stays as it is."""
        state = self.state
        if state.mixed_round >= row.round:
            return True
        self._check(row)
        names = [name for name, _ in row.neighbours]
        is_complete = state.prepared == row.round and all(name in state.stored for name in names)
        changes: dict[str, object] = {"mixed_round": row.round, "is_trained": False, "stored": dict[str, str]()}
        if is_complete:
            changes["model"] = self._folder.put(self._mix_sums(row) if self._is_directed else self._mix_models(row))
        # Neighbours' public copies are the bases of their next steps.
        is_kept = is_complete and self._codec is not None
        changes["mixed_with"] = {name: state.stored[name] for name in names} if is_kept else dict[str, str]()
        self._save(**changes)
        self._folder.tidy(self._initial_copy)
        return is_complete

    def _check(self, row: messages.CommitRow) -> None:
        weights = [row.own, *(weight for _, weight in row.neighbours)]
        is_average = all(0.0 <= weight <= 1.0 for weight in weights)
        if not self._is_directed:  # in push-sum it is the columns of W that add up to 1
            is_average = is_average and abs(math.fsum(weights) - 1.0) < _ROUNDING
        if not is_average:
            raise GossipError(
                f"the weights of round {row.round} are no average; expected numbers from 0 to 1 with sum 1"
            )

    def _mix_models(self, row: messages.CommitRow) -> Parameters:
        neighbours = [(weight, self._read_plain(self.state.stored[name])) for name, weight in row.neighbours]
        copy, spreads = self._read_plain(self.announced), self._initial.schema.spreads
        return mixing.make_model_file(mix(self.read(), neighbours, copy, self._gamma, spreads))

    def _mix_sums(self, row: messages.CommitRow) -> Parameters:
        own = mixing.read_sum_file(self._path(self.state.model), self.size)
        others = [
            (weight, *mixing.read_sum_file(self._path(self.state.stored[name]), self.size))
            for name, weight in row.neighbours
        ]
        total, weight = combine((row.own, *own), others)  # type: ignore[arg-type] -- these sums are float64
        return mixing.make_sum_file(total.astype(np.float64, copy=False), weight)

    def keep_mean(self, mean: Vector, round_number: int, attempt: int, chunks: tuple[str, ...]) -> PendingMean:
        """Store the mean of an attempt at a ring, and return it."""
        file = mixing.make_mean_file(self._initial, mean)
        away = self.read().astype(np.float64) - file.to_vector()
        pending = PendingMean(round_number, attempt, self._folder.put(file), float(away @ away), chunks)
        self._save(mean=pending)
        return pending

    def check_mean(self, path: Path) -> None:
        """Raise `GossipError`, and delete a file of another silo, unless it is a model of the job."""
        try:
            mixing.read_mean_file(path, self._initial.schema)
        except GossipError:
            self._folder.discard(path)
            raise

    def adopt(self, mean: Path, digest: str, round_number: int) -> None:
        """Replace the silo's model by a mean, of which the file is checked and has this digest."""
        vector, pending = mixing.read_mean_file(mean, self._initial.schema), self.state.mean
        self._folder.admit(mean, digest)
        if pending is None or pending.digest != digest:
            pending = PendingMean(round_number, 0, digest, 0.0, ())
        changes: dict[str, object] = {"adopted_round": round_number, "is_trained": False, "mean": pending}
        if self.is_ring:
            changes["mixed_round"] = max(round_number, self.state.mixed_round)
        self._save(model=self._put(vector), **changes)
        self._folder.tidy(self._initial_copy)

    def count_bytes(self, sent: int, received: int) -> None:
        """Add bytes that were sent and received; they are stored with the next change."""
        before = self.state.num_bytes
        self._folder.state = structs.replace(self.state, num_bytes=(before[0] + sent, before[1] + received))

    def begin_round(self, assignment: bytes) -> None:
        """Store the assignment of a round, with which the silo continues if its process ends meanwhile."""
        self._save(assignment=assignment)

    def end_round(self) -> None:
        """Record that the round is over, and delete the key of its relay."""
        self._save(assignment=b"", relay=None)

    def _put(self, vector: Vector) -> str:
        """Store a model as the silo's, with the weight 1."""
        if self._is_directed:
            return self._folder.put(mixing.make_sum_file(vector.astype(np.float64), 1.0))
        return self._folder.put(mixing.make_model_file(vector))

    def _save(self, **changes: object) -> None:
        self._folder.save(structs.replace(self.state, **changes))

    def _path(self, digest: str) -> Path:
        path = self._folder.find(digest)
        if path is None:
            raise GossipError(f"the silo's file {digest} is missing")
        return path

    def _read_plain(self, digest: str) -> Vector:
        return mixing.read_model_file(self._path(digest), self.size)
