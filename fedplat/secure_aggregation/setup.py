"""What all participants of an attempt agree on, and derive every key from; and who shares masks with whom.

Source: Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS), Section 3. The
positions of a group are a random order of its clients, so that a graph in which each is connected to the nearest ones
is a random one to them. The server draws this order. One that does not draw it at random could surround a client with
its accomplices in a large group; `ParticipantLimits.trusted_keys` keeps those out.

A client shares masks with the nearest of those that hold shares of its secrets (`Graph.peers`), not with all. Of the
three conditions on a graph in Bell et al. 2020, Section 3.2, two are about shares: few holders collude, and enough
survive. Masks need the other one: the honest survivors are connected, so that only the sum of all of them is known.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct, structs

from fedplat.config.decoding import prepare_type
from fedplat.errors import SecureAggregationError
from fedplat.privacy import noise
from fedplat.secure_aggregation.messages import (
    EXACT_MODULUS,
    KEY_BYTES,
    MAX_GROUP,
    Finite,
    Member,
    SecureAggregation,
    Survivors,
)

VERSION = 2
"""Version of the protocol. A client and a server with different ones do not work together on secure jobs."""
FEATURE = f"secure_aggregation.{VERSION}"
"""The feature that a client must state to take part."""
EXACT_VERSION = 3
"""Version of the protocol with exact sums. Those of updates keep `VERSION` and its bytes."""
EXACT_FEATURE = f"secure_aggregation.{EXACT_VERSION}"
"""The feature that a client must state to take part in exact sums."""
EXTRAS_LEVELS = 2**20
"""Maximum number of steps for a unit of a weight or a metric."""
MIN_CLIP = 1e-30
"""Least clip norm: entries divided by it are finite."""
_MAX_NORM = 2**24


class LocalNoise(Struct, frozen=True, forbid_unknown_fields=True):
    """The noise that each client adds to its own quantized update: the difference of two Poisson draws (Skellam).

    `scale` is the number of the quantizer's steps for a unit of an update, and `metrics_scale` that for a unit of the
    metrics, which are mapped to the range from -1 to 1. `variance` and `metrics_variance` are those of one client's
    noise in each entry, in squared steps.
    """

    scale: Annotated[float, Meta(gt=0.0, le=1e30)]
    variance: Annotated[float, Meta(gt=0.0, le=1e30)]
    metrics_scale: Annotated[int, Meta(ge=0, le=2**31)] = 0
    metrics_variance: Annotated[float, Meta(ge=0.0, le=1e30)] = 0.0


class Encoding(Struct, frozen=True, forbid_unknown_fields=True):
    """How updates become integers (`encoding.py`).

    `size` is the number of floating-point entries of an update. `clip` bounds the L2 norm of weight times update, where
    the weight is examples / `max_examples` but at most 1, or 1 if `max_examples` is 0. `metrics` has the name, the
    lowest and the highest value of each. With `noise` entries are rotated before they are quantized, and weights are
    not sent.
    """

    size: Annotated[int, Meta(ge=1)]
    clip: Annotated[float, Meta(ge=MIN_CLIP, le=1e30)]
    bits: Annotated[int, Meta(ge=2, le=24)]
    modulus: Annotated[int, Meta(ge=8, le=32)]
    max_examples: Annotated[float, Meta(ge=0.0, le=1e30)]
    max_clients: Annotated[int, Meta(ge=1, le=MAX_GROUP)]
    """Maximum number of clients of a group: so many encoded updates add up without an overflow."""
    metrics: Annotated[tuple[tuple[str, Finite, Finite], ...], Meta(max_length=100)] = ()
    noise: LocalNoise | None = None

    def __post_init__(self) -> None:
        for name, low, high in self.metrics:
            if not low < high:
                raise ValueError(f"the metric {name} is from {low:g} to {high:g}; expected a range")
        if self.noise is None:
            return
        if self.scale * self.clip > _MAX_NORM:
            raise ValueError(f"clip has {self.scale * self.clip:g} steps; expected at most {_MAX_NORM}")
        if self.metrics and not (self.noise.metrics_scale and self.noise.metrics_variance):
            raise ValueError("the metrics have no noise; expected some, as the update has")

    @property
    def length(self) -> int:
        """The number of entries of an encoded update: those of the update, its weight, and the metrics."""
        return self.size + 1 + len(self.metrics)

    @property
    def levels(self) -> int:
        """The number of the quantizer's steps from 0 to `clip`."""
        return 2 ** (self.bits - 1) - 1

    @property
    def scale(self) -> float:
        """The number of steps for a unit of an update."""
        return self.levels / self.clip if self.noise is None else self.noise.scale

    @property
    def extras_scale(self) -> int:
        """The number of steps for a unit of the weight, and of metrics, which are mapped to the range from -1 to 1."""
        if self.noise is not None:
            return self.noise.metrics_scale
        return min(EXTRAS_LEVELS, (2 ** (self.modulus - 1) - 1) // self.max_clients)

    @property
    def sensitivity(self) -> float:
        """The bound on the L2 norm of an encoded update with noise, without the noise and the metrics, in steps."""
        return noise.rounded_sensitivity(self.scale * self.clip, self.size)

    def noise_multiplier(self, num_survivors: int) -> float:
        """Return the noise multiplier of a sum of so many clients, with its metrics; 0 without noise."""
        if self.noise is None:
            return 0.0
        squared = self.noise.variance / self.sensitivity**2
        if not self.metrics:
            return math.sqrt(squared * num_survivors)
        of_metrics = self.noise.metrics_variance / (len(self.metrics) * self.noise.metrics_scale**2)
        return math.sqrt(num_survivors / (1.0 / squared + 1.0 / of_metrics))


class ExactEncoding(Struct, frozen=True, forbid_unknown_fields=True):
    """How replies that are integers add up without any rounding: in 64 bits, with their signs.

    `length` is the number of entries of a reply. Its maker guarantees that no entry is beyond `bound`, negative or not.
    """

    length: Annotated[int, Meta(ge=1, le=2**32)]
    bound: Annotated[int, Meta(ge=1, le=2**62)]
    max_clients: Annotated[int, Meta(ge=1, le=MAX_GROUP)]
    """Maximum number of clients of a group: so many replies add up without an overflow."""

    def __post_init__(self) -> None:
        if self.bound * self.max_clients >= 2**63:
            raise ValueError(
                f"the sum of {self.max_clients} entries up to {self.bound} does not fit 64 bits with its sign; "
                "expected fewer clients, lower bounds or larger steps"
            )

    @property
    def modulus(self) -> int:
        """The bits of a masked entry."""
        return EXACT_MODULUS


class BaseSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a setup that does not depend on how the sum is encoded.

    `task_digest` is that of what all trainers get besides the model (`digest_task`): with other hyper-parameters for
    the others, such as no steps, the sum would be the update of one client.
    """

    job_id: str
    round: int
    attempt: int
    model_digest: str
    task_digest: str
    options: SecureAggregation

    def to_bytes(self) -> bytes:
        """Encode the setup; equal setups have equal bytes."""
        return msgspec.msgpack.encode(self, order="deterministic")

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Decode a setup. Raises `SecureAggregationError` also for another version of the protocol."""
        expected = structs.fields(cls)[-1].default
        try:
            version = msgspec.msgpack.decode(content, type=prepare_type(_Version)).version
            if version != expected:
                raise SecureAggregationError(
                    f"the secure aggregation has version {version}; this program has {expected}: upgrade the older one"
                )
            return msgspec.msgpack.decode(content, type=prepare_type(cls))
        except (msgspec.MsgspecError, ValueError) as exc:
            raise SecureAggregationError(f"the setup of the secure aggregation cannot be read: {exc}") from exc

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the setup."""
        return _digest_setup(self.to_bytes())

    def context(self, members: Sequence[Member]) -> bytes:
        """Return the digest of the setup and of a group's members, which is bound into every derived key."""
        return hash_parts(b"fedplat secure aggregation context 1", self.digest, *(each.to_bytes() for each in members))


class Setup(BaseSetup, frozen=True, forbid_unknown_fields=True):
    """The setup of an attempt, which the server sends with each assignment.

    `minimum` is the number of survivors below which a group's sum is not unmasked.
    """

    encoding: Encoding
    minimum: Annotated[int, Meta(ge=2)]
    version: int = VERSION


class ExactSetup(BaseSetup, frozen=True, forbid_unknown_fields=True):
    """The setup of an attempt whose replies are integers; otherwise like `Setup`."""

    encoding: ExactEncoding
    minimum: Annotated[int, Meta(ge=2)]
    version: int = EXACT_VERSION


AnySetup = Setup | ExactSetup


class _Version(Struct, frozen=True):
    """The only field that every version of a setup has."""

    version: int


def digest_task(trainer: str, job_name: str, config: Mapping[str, bool | int | float | str]) -> str:
    """Return the SHA-256 of what the trainers of an attempt get besides the model, hexadecimal."""
    content = msgspec.msgpack.encode((trainer, job_name, dict(config)), order="deterministic")
    return hash_parts(b"fedplat secure aggregation task 1", content).hex()


def keys_payload(setup: BaseSetup, encryption_key: bytes, masking_key: bytes) -> bytes:
    """Return the bytes that a client signs when it advertises its keys."""
    assert len(encryption_key) == len(masking_key) == KEY_BYTES
    return hash_parts(b"fedplat secure aggregation keys 1", setup.digest, encryption_key, masking_key)


def survivors_payload(context: bytes, survivors: Survivors) -> bytes:
    """Return the bytes that a client signs to confirm the survivors of its group."""
    return hash_parts(b"fedplat secure aggregation survivors 1", context, survivors.to_bytes())


@functools.lru_cache(maxsize=16)  # every member's signature of a roster is over it
def _digest_setup(content: bytes) -> bytes:
    return hash_parts(b"fedplat secure aggregation setup 1", content)


def hash_parts(*parts: bytes) -> bytes:
    """Return the SHA-256 of byte strings with their lengths: other parts have another hash."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


MAX_COMPLETE = 100
"""Maximum number of clients of a group with a complete graph, unless the job says otherwise."""
ADVERSARIES = 0.1
"""Part of the clients that may collude with the server, for which default numbers of neighbours are enough."""
DROPOUTS = 0.1
"""Part of the clients that may drop out."""
_SECURITY = 2**41
"""One in how many graphs may be disconnected, and one in how many may have too many colluding neighbours."""
_CORRECTNESS = 2**20
"""One in how many graphs may fail because of drop-outs."""
_LEAST_SPARSE = 50
"""Minimum number of clients of a group in which a client does not share masks with all that hold its shares."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """A circle of `size` positions, each of which is connected to the `degree` nearest ones, which hold its shares.

    `threshold` shares of the `degree` + 1 of a secret recover it. The `num_peers` nearest ones share masks with it.
    """

    size: int
    degree: int
    threshold: int
    num_peers: int

    @classmethod
    def of(cls, options: SecureAggregation, size: int) -> Graph:
        """Return the graph of a group.

        Each client shares masks with all its neighbours if the job states their number, and if clients confirm the
        survivors: a server that lies about who dropped out could leave few of the masks of a client.
        """
        degree = min(options.neighbours or default_degree(size, options.threshold), size - 1)
        num_peers = degree
        if not options.neighbours and not options.confirm:
            num_peers = min(default_peers(size, options.threshold), degree)
        return cls(size, degree, _count_threshold(options.threshold, degree), num_peers)

    def neighbours(self, position: int) -> list[int]:
        """Return the positions that hold shares of one, without itself, in ascending order."""
        return self._nearest(position, self.degree)

    def peers(self, position: int) -> list[int]:
        """Return the positions that share masks with one, in ascending order: some of its neighbours, or all."""
        return self._nearest(position, self.num_peers)

    def _nearest(self, position: int, count: int) -> list[int]:
        if not 0 <= position < self.size:
            raise SecureAggregationError(f"position {position} is not in a group of {self.size}")
        if count == self.size - 1:
            return [other for other in range(self.size) if other != position]
        half = count // 2
        steps = [step for step in range(-half, half + 1) if step]
        return sorted((position + step) % self.size for step in steps)

    def holders(self, position: int) -> list[int]:
        """Return the positions that hold shares of the secrets of one: its neighbours and itself."""
        return sorted((position, *self.neighbours(position)))

    def is_recoverable(self, secrets: Collection[int], answered: Collection[int]) -> bool:
        """Return whether enough holders have answered to recover a secret of each of the positions `secrets`.

        The work is linear in the size of the group, because the server asks after every answer.
        """
        found = frozenset(answered)
        if self.degree == self.size - 1 or not secrets:
            return not secrets or len(found) >= self.threshold
        marks = [position in found for position in range(self.size)]
        half = self.degree // 2
        sums = [0, *itertools.accumulate(marks[-half:] + marks + marks[:half])]  # around the circle
        return all(sums[each + self.degree + 1] - sums[each] >= self.threshold for each in secrets)


@functools.lru_cache(maxsize=64)
def default_degree(size: int, threshold: float) -> int:
    """Return the number of neighbours of each client in a group, for a threshold as a part of their holders.

    Fewer than 2^-40 of the graphs let a server that tells clients different things read an update with the help of
    `ADVERSARIES` of the clients, and fewer than 2^-20 fail with `DROPOUTS`. The graph is complete in small groups, and
    for thresholds that no smaller number of neighbours makes safe.
    """
    if size > MAX_COMPLETE:
        for degree in range(2, size - 1, 2):
            shares = _count_threshold(threshold, degree)
            bounds = _bound_threshold(size, degree, ADVERSARIES, DROPOUTS)
            # Honest holders answer once, the client itself included, and colluding ones for both of its secrets.
            if bounds is not None and shares <= bounds[1] and 2 * shares > degree + 1 + bounds[0]:
                return degree
    return size - 1


@functools.lru_cache(maxsize=64)
def default_peers(size: int, threshold: float) -> int:
    """Return the number of clients with which each client of a group shares masks.

    The honest survivors are connected but for 2^-41 of the graphs, although as many clients collude as shares protect
    against if the server lies (2 `threshold` - 1 of them, a third by default), and `DROPOUTS` more of them drop out.
    """
    missing = math.floor((max(ADVERSARIES, 2.0 * threshold - 1.0) + DROPOUTS) * size + 1e-9)
    if size >= _LEAST_SPARSE and missing < size - 1:
        for degree in range(2, size - 1, 2):
            if _is_connected(size, degree, missing):
                return degree
    return size - 1


def find_parameters(size: int, adversaries: float, dropouts: float, *, is_active: bool) -> tuple[int, int]:
    """Return the smallest number of neighbours, and a threshold for it, for a group of which parts collude or drop out.

    This is the computation of google/federated-compute (`fcp/secagg/server/graph_parameter_finder.cc`), with exact
    tails. `is_active` is for a server that tells clients different things; otherwise it only is curious.
    """
    for degree in range(2, size - 1, 2):
        bounds = _bound_threshold(size, degree, adversaries, dropouts)
        if bounds is None:
            continue
        colluding, surviving = bounds
        least = max(2, (colluding + degree) // 2 + 1 if is_active else colluding + 1)
        if least <= surviving:
            return degree, least
    raise SecureAggregationError(f"no graph of {size} clients is safe with so many that collude or drop out")


def _count_threshold(threshold: float, degree: int) -> int:
    holders = degree + 1
    return max(holders // 2 + 1, math.ceil(round(threshold * holders, 9)))


def _bound_threshold(size: int, degree: int, adversaries: float, dropouts: float) -> tuple[int, int] | None:
    """Return how many of a client's neighbours collude at most, and how many survive at least.

    Both hold for all clients but for the chances above. None: the graph of the honest survivors may be disconnected.
    """
    colluding, dropped = (math.floor(part * size + 1e-9) for part in (adversaries, dropouts))
    if not _is_connected(size, degree, colluding + dropped):
        return None
    return (
        _bound_tail(size, colluding, degree, size * _SECURITY),
        degree - _bound_tail(size, dropped, degree, size * _CORRECTNESS),
    )


def _is_connected(size: int, degree: int, missing: int) -> bool:
    """Return whether the graph without `missing` random positions is connected, but for one in `_SECURITY`.

    To cut the circle, half of `degree` consecutive positions must be missing in two places.
    """
    if degree > missing:
        return True
    places = size * (size - degree - 1) // 2
    return places * math.comb(size - degree, missing - degree) * _SECURITY < math.comb(size, missing)


def _bound_tail(size: int, marked: int, draws: int, one_in: int) -> int:
    """Return the least number that the marked ones among `draws` of `size` exceed in at most one of `one_in` cases."""
    total, cases = math.comb(size, draws), 0
    for number, ways in _count_ways(size, marked, draws):
        cases += ways
        if cases * one_in > total:
            return number
    return -1


def _count_ways(size: int, marked: int, draws: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of marked ones among those drawn, from the highest, and the ways to draw so many."""
    for number in range(min(marked, draws), -1, -1):
        yield number, math.comb(marked, number) * math.comb(size - marked, draws - number)
