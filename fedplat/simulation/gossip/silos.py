"""The models of simulated silos: training with an engine, and mixing as a silo does it from its stored files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat import codecs, job, rounds
from fedplat.config.plugins import build_checked
from fedplat.gossip import combine, compress, messages, mix, mixing
from fedplat.gossip.mixing import replace_entries
from fedplat.model import FLOATING, Parameters, Vector
from fedplat.simulation.clients import device, fleet
from fedplat.simulation.engines.interface import ClientTask, Engine
from fedplat.simulation.federated.interface import NoTraining, Report
from fedplat.simulation.federated.training import training_seed

_CODEC = 4


class SiloModels:
    """The models of all silos: numerators [silos, entries] and weights [silos] of push-sum, else models and ones.

    With a codec, `copies` are the public copies, and the chain of each is known by the sizes of its payloads.
    """

    def __init__(self, spec: job.JobSpec, engine: Engine, initial: Parameters, seed: int) -> None:
        mode, count = spec.gossip, engine.num_clients
        assert mode is not None
        self._mode, self._engine, self._seed = mode, engine, seed
        self._spreads = initial.schema.spreads
        vector = initial.to_vector()
        self._whole: list[Parameters] = [initial] * count
        self.values = np.tile(vector.astype(np.float64 if mode.is_directed else np.float32), (count, 1))
        self.weights = np.ones(count)
        self._codec: codecs.Codec | None = None
        if spec.compression.uplink is not None:
            self._codec = build_checked(spec.compression.uplink, codecs.Codec, "compression.uplink.codec")
        self.copies = self.values.copy() if self._codec is not None else self.values
        self._payloads: list[list[int]] = [[] for _ in range(count)]
        self._followed: dict[tuple[int, int], int] = {}
        self._stored: dict[int, dict[int, tuple[Vector, float]]] = {}
        self._versions = itertools.count()
        self._tasks: dict[int, ClientTask] = {}

    @property
    def count(self) -> int:
        """The number of silos."""
        return len(self.weights)

    @property
    def model_bytes(self) -> int:
        """The size of a silo's model file."""
        return self._whole[0].schema.file_size_bytes

    def model_of(self, silo: int) -> Vector:
        """Return a silo's model as float32; with push-sum the sum divided by the weight."""
        return (self.values[silo] / self.weights[silo]).astype(np.float32)

    def models(self) -> npt.NDArray[np.float64]:
        """Return all models, shape [silos, entries]."""
        return self.values / self.weights[:, None]

    def begin_training(self, fractions: Mapping[int, float], round_number: int) -> None:
        """Begin to train silos, each from its own model, with a fraction of their local steps."""
        for silo, fraction in fractions.items():
            version = next(self._versions)
            self._whole[silo] = replace_entries(self._whole[silo], self.model_of(silo))
            self._engine.publish(version, self._whole[silo])
            seed = training_seed(self._seed, silo, round_number)
            self._tasks[silo] = ClientTask(silo, version, seed, fraction, round_number=round_number)
        self._engine.begin([self._tasks[silo] for silo in fractions])

    def finish_training(self, silo: int) -> Mapping[str, float] | None:
        """Add a silo's update to its model, and return the metrics; None if the update is not finite, and not added."""
        task = self._tasks.pop(silo)
        trained = self._engine.result(task)
        step = trained.update.to_vector()
        is_finite = bool(np.isfinite(step).all())
        if not is_finite:
            self._engine.drop(task)
        self._engine.retire(task.version)
        if not is_finite:
            return None
        self.values[silo] += step
        for run in self._whole[silo].schema.segments:
            if run.dtype not in FLOATING:
                self._whole[silo] = self._whole[silo].copy()
                self._whole[silo].segment(run)[:] = trained.update.segment(run)
        return trained.metrics

    def drop_training(self, silo: int) -> None:
        """End a silo's training without a result."""
        task = self._tasks.pop(silo)
        self._engine.drop(task)
        self._engine.retire(task.version)

    def publish(self, silo: int, round_number: int) -> None:
        """Make a silo's model available to neighbours; with a codec, as one more step of its public copy."""
        self._stored[silo] = {}
        if self._codec is None:
            return
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _CODEC, silo, round_number]))
        payload, self.copies[silo] = compress(self._codec, self.values[silo], self.copies[silo], rng)
        self._payloads[silo].append(len(payload))

    def pull_bytes(self, receiver: int, sender: int) -> int:
        """Return what a silo gets from a neighbour: a model, or the steps that it lacks of its public copy.

        All silos begin with the same model, so the first steps are enough; a long chain is replaced by the whole copy.
        """
        if self._codec is None:
            return self.model_bytes
        return min(self.model_bytes, sum(self._payloads[sender][self._followed.get((receiver, sender), 0) :]))

    def store(self, receiver: int, sender: int) -> float:
        """Store a neighbour's model with a silo, and return its squared distance from the silo's own."""
        other = self.copies[sender].copy()
        self._stored[receiver][sender] = other, float(self.weights[sender])
        self._followed[receiver, sender] = len(self._payloads[sender])
        away = other / self.weights[sender] - self.copies[receiver].astype(np.float64) / self.weights[receiver]
        return float(away @ away)

    def mix(self, row: messages.CommitRow) -> None:
        """Mix a silo's model with those that it has stored."""
        silo = int(row.silo)
        stored = self._stored[silo]
        if self._mode.is_directed:
            others = [(weight, *stored[int(name)]) for name, weight in row.neighbours]
            self.values[silo], self.weights[silo] = combine(
                (row.own, self.values[silo], float(self.weights[silo])), others
            )
            return
        gamma = 1.0 if self._mode.gamma is None else self._mode.gamma
        neighbours = [(weight, stored[int(name)][0]) for name, weight in row.neighbours]
        self.values[silo] = mix(self.values[silo], neighbours, self.copies[silo], gamma, self._spreads)

    def largest(self, silo: int) -> float:
        """Return the largest magnitude in a silo's model."""
        return mixing.find_largest(self.model_of(silo))

    def reduce(self, ring: messages.BeginRing) -> tuple[Parameters, str]:
        """Return the mean of a ring and its digest: the masks of a real one cancel, so it has the same bits."""
        members = len(ring.members)
        parts = [
            mixing.quantize_share(self.model_of(int(each.silo)), each.share, ring.bound, members)
            for each in ring.members
        ]
        mean = mixing.read_integer_mean(mixing.add_parts(parts), ring.bound, members)
        return replace_entries(self._whole[int(ring.members[0].silo)], mean), mixing.digest_mean(mean)

    def distance_from(self, silo: int, mean: Parameters) -> float:
        """Return the squared distance of a silo's model from a mean."""
        away = self.model_of(silo).astype(np.float64) - mean.to_vector()
        return float(away @ away)

    def replace_all(self, mean: Parameters, silos: Sequence[int]) -> None:
        """Give silos the mean as their model."""
        self.values[list(silos)] = mean.to_vector()

    def evaluate(self) -> Mapping[str, float]:
        """Score the mean of all silos' models on the central test data."""
        return self._engine.evaluate(replace_entries(self._whole[0], self.models().mean(axis=0).astype(np.float32)))


class SiloTraining(NoTraining):
    """The silos of a decentralised job, which train and mix `models` and exchange them over `links`.

    `model` is the mean that the silos have exported, and `scores` the evaluation of the round that ends.
    """

    one_at_a_time = True

    def __init__(self, models: SiloModels, links: fleet.LinkOptions) -> None:
        super().__init__(models.model_bytes)
        self.models, self.links = models, links
        self.model: Parameters | None = None
        self.scores: Mapping[str, float] = {}

    @override
    def report(self, task: device.DeviceAssignment) -> Report:
        raise AssertionError(task)

    @override
    def settle(self, key: rounds.AttemptKey, version: int | None) -> Mapping[str, float]:
        scores, self.scores = self.scores, {}
        return scores
