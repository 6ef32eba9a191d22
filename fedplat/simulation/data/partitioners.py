"""Partitioners: they assign examples to clients, as `[simulation.partition]` of a simulation file describes.

Each assigns every example to at most one client, and returns the same parts for the same generator.
`docs/contributing.md` has the steps to add one.

Every client draws its own mixture of classes, Dirichlet(alpha * p) for class frequencies p, and then its examples one
by one without replacement. All clients have the same number of examples.

The examples of each class are divided over the clients by proportions from Dirichlet(alpha). As in the benchmark's
published code, a client that already has its fair share gets no examples of later classes, and the whole partition is
drawn again until every client has `min_examples`. Clients differ in their sizes and in their labels.

As in the paper's published code: client i has the classes i, i + 1 ... (mod their number), `base` examples of each,
and then a lognormal share of the rest of each class. Examples that remain after rounding are unused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.config.plugins import Kind, by_name, define
from fedplat.errors import DataError
from fedplat.simulation.data.federation import Dataset, Part

Clients = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Examples = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
SomeExamples = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")
MAX_DRAWS = 10_000
"""The number of draws of a random split after which a client with too few examples is an error."""


class BasePartition(msgspec.Struct, frozen=True, kw_only=True):
    """The base of options records of partitioners; `seed` replaces the seed of the simulation (None: it does not)."""

    seed: int | None = None


def class_labels(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Return the class of each example, from 0 in the order of the labels. Raises `DataError` without classes."""
    targets = dataset.targets
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        raise DataError(
            f"targets are {targets.dtype}{list(targets.shape)}; a partition by label needs one integer per example"
        )
    return np.unique(targets, return_inverse=True)[1].astype(np.int64)


def members(labels: npt.NDArray[np.int64], rng: np.random.Generator) -> list[Part]:
    """Return the examples of each class, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]


def group(values: npt.NDArray[Any]) -> list[Part]:
    """Return the examples of each value, in the order of the values; examples keep their order.

    Texts that are all numbers are in the order of these: 4, 30, 100; equal ones (7, 007) in that of the texts.
    """
    names, codes = np.unique(values, return_inverse=True)
    if names.dtype.kind == "U" and all(map(_NUMBER.fullmatch, names.tolist())):
        ranked = sorted(range(len(names)), key=lambda index: (Decimal(names[index]), names[index]))
        codes = np.argsort(ranked)[codes]
    order = np.argsort(codes, kind="stable").astype(np.int64)
    _, starts = np.unique(codes[order], return_index=True)
    return np.split(order, starts[1:])


def cut(indices: Part, sizes: npt.NDArray[np.int64] | Sequence[int]) -> list[Part]:
    """Return consecutive pieces of `indices` of the given sizes, and drop the rest."""
    ends = np.cumsum(sizes)
    return [indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def require(num_examples: int, needed: int, what: str) -> None:
    """Raise `DataError` if there are fewer examples than a partition needs."""
    if num_examples < needed:
        raise DataError(f"{what} needs at least {needed} examples; there are {num_examples}")


def whole_sizes(shares: npt.NDArray[np.float64], total: int, minimum: int) -> npt.NDArray[np.int64]:
    """Return integers proportional to `shares` that add up to `total`, each at least `minimum`.

    Each client gets the minimum first, then its share of the rest, rounded by the largest-remainder method.
    """
    exact = shares / shares.sum() * (total - minimum * len(shares))
    sizes = np.floor(exact).astype(np.int64)
    left = total - minimum * len(shares) - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes + minimum


class Iid(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="iid"):
    """Every client has the same number of examples (at most one more or less), drawn at random.

    `examples` is the number of each client (0: all examples, divided evenly).
    """

    clients: Clients
    examples: Examples = 0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        total = len(dataset.targets)
        if self.examples:
            require(total, self.clients * self.examples, f"{self.clients} clients with {self.examples} examples each")
            return cut(rng.permutation(total), [self.examples] * self.clients)
        require(total, self.clients, f"an IID partition over {self.clients} clients")
        return np.array_split(rng.permutation(total), self.clients)


class Shards(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="shards"):
    """Examples are sorted by label and cut into equal shards, of which every client gets `shards_per_client`.

    With MNIST and 100 clients: 200 shards of 300, two for each client, so that most clients have two digits only.
    `shard_size` is the number of examples in a shard (0: as many as possible). Examples that do not fill a
    shard are unused.
    """

    clients: Clients
    shards_per_client: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 2
    shard_size: Examples = 0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        labels = class_labels(dataset)
        count = self.clients * self.shards_per_client
        size = self.shard_size or len(labels) // count
        require(len(labels), count * max(size, 1), f"{count} shards")
        shards = np.argsort(labels, kind="stable")[: count * size].reshape(count, size)
        return list(shards[rng.permutation(count)].reshape(self.clients, -1).astype(np.int64))


class Hsu(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="hsu"):
    """Partition by a Dirichlet mixture per client.

    `examples` is the number of each client (0: as many as possible). A class without unused examples is
    removed from the mixtures of later clients.
    """

    clients: Clients
    alpha: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 0.5
    examples: Examples = 0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        labels = class_labels(dataset)
        size = self.examples or len(labels) // self.clients
        require(len(labels), self.clients * max(size, 1), f"{self.clients} clients with {max(size, 1)} examples each")
        pools = members(labels, rng)
        left = np.array([len(pool) for pool in pools])
        prior = left / left.sum()
        parts: list[Part] = []
        for _ in range(self.clients):
            mixture = rng.dirichlet(np.maximum(self.alpha * prior, 1e-12))
            wanted = np.zeros(len(pools), np.int64)
            while (missing := size - int(wanted.sum())) > 0:
                open_classes = np.where(left > wanted, mixture, 0.0)
                if open_classes.sum() == 0.0:  # no class of the mixture has unused examples
                    open_classes = (left - wanted).astype(np.float64)
                drawn = rng.multinomial(missing, open_classes / open_classes.sum())
                wanted = np.minimum(wanted + drawn, left)
            left -= wanted
            parts.append(np.concatenate([pool[n : n + k] for pool, n, k in zip(pools, left, wanted, strict=True)]))
        return parts


class Dirichlet(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="dirichlet"):
    """Partition by Dirichlet proportions. A small `alpha` gives each client few classes; a large one is nearly IID."""

    clients: Clients
    alpha: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 0.5
    min_examples: SomeExamples = 10

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        labels = class_labels(dataset)
        require(
            len(labels), self.clients * self.min_examples, f"{self.min_examples} for each of {self.clients} clients"
        )
        counts = np.bincount(labels)
        for _ in range(MAX_DRAWS):
            sizes = self._sizes(counts, rng)
            if sizes.sum(axis=0).min() >= self.min_examples:
                break
        else:
            raise DataError(
                f"no Dirichlet({self.alpha:g}) partition in {MAX_DRAWS} draws gave each of {self.clients} clients "
                f"{self.min_examples} examples; use a larger alpha, fewer clients or a smaller min_examples"
            )
        by_class = [cut(pool, row) for pool, row in zip(members(labels, rng), sizes, strict=True)]
        return [np.concatenate(pieces) for pieces in zip(*by_class, strict=True)]

    def _sizes(self, counts: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw the number of examples of each class (rows) of each client (columns)."""
        sizes = np.zeros((len(counts), self.clients), np.int64)
        fair_share = counts.sum() / self.clients
        for label, count in enumerate(counts):
            shares = rng.dirichlet(np.full(self.clients, self.alpha))
            shares = shares * (sizes.sum(axis=0) < fair_share)
            if shares.sum() == 0.0:  # with a tiny alpha, clients below their fair share may all draw 0
                shares = (sizes.sum(axis=0) < fair_share).astype(np.float64)
            ends = (np.cumsum(shares / shares.sum()) * count).astype(np.int64)
            ends[-1] = count
            sizes[label] = np.diff(ends, prepend=0)
        return sizes


class Classes(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="classes"):
    """Every client has examples of `classes_per_client` classes, and a class is divided evenly over its clients.

    Client i has class i mod the number of classes, as in the benchmark's code, and others at random.
    """

    clients: Clients
    classes_per_client: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 2

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client; the examples of a class that no client has are unused."""
        pools = members(class_labels(dataset), rng)
        if self.classes_per_client > len(pools):
            raise DataError(f"classes_per_client = {self.classes_per_client}: the data has {len(pools)} classes")
        owners: list[list[int]] = [[] for _ in pools]
        for client in range(self.clients):
            first = client % len(pools)
            others = rng.permutation([label for label in range(len(pools)) if label != first])
            for label in (first, *others[: self.classes_per_client - 1]):
                owners[label].append(client)
        parts: list[list[Part]] = [[] for _ in range(self.clients)]
        for label, (pool, clients) in enumerate(zip(pools, owners, strict=True)):
            if len(clients) > len(pool):
                raise DataError(f"class {label} has {len(pool)} examples for {len(clients)} clients; use fewer clients")
            for client, piece in zip(clients, np.array_split(pool, max(len(clients), 1)), strict=False):
                parts[client].append(piece)
        return [np.concatenate(pieces) for pieces in parts]


class Quantity(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="quantity"):
    """Sizes follow a distribution; labels are IID.

    `spread` is its parameter: the sigma of "lognormal", the exponent of "powerlaw" (the client of rank r has a share
    proportional to r ** -spread), the concentration of "dirichlet" (as in NIID-Bench; smaller is more unequal).
    """

    clients: Clients
    distribution: Literal["lognormal", "powerlaw", "dirichlet"] = "lognormal"
    spread: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 1.0
    min_examples: SomeExamples = 1

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        total = len(dataset.targets)
        require(total, self.clients * self.min_examples, f"{self.min_examples} for each of {self.clients} clients")
        match self.distribution:
            case "lognormal":
                logs = self.spread * rng.standard_normal(self.clients)
                shares = np.exp(logs - logs.max())
            case "powerlaw":
                shares = rng.permutation(np.arange(1.0, self.clients + 1) ** -self.spread)
            case "dirichlet":
                shares = rng.dirichlet(np.full(self.clients, self.spread))
        return cut(rng.permutation(total), whole_sizes(shares, total, self.min_examples))


class FedProx(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="fedprox"):
    """By default the paper's MNIST: 1,000 clients, two digits each, sizes by lognormal(0, 2), close to a power law."""

    clients: Clients = 1000
    classes_per_client: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 2
    base: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 5
    sigma: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 2.0

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client."""
        pools = members(class_labels(dataset), rng)
        if self.classes_per_client > len(pools):
            raise DataError(f"classes_per_client = {self.classes_per_client}: the data has {len(pools)} classes")
        parts: list[list[Part]] = [[] for _ in range(self.clients)]
        for label, pool in enumerate(pools):
            owners = [
                client for client in range(self.clients) if (label - client) % len(pools) < self.classes_per_client
            ]
            left = len(pool) - self.base * len(owners)
            if left < 0:
                raise DataError(
                    f"class {label} has {len(pool)} examples for {len(owners)} clients with {self.base} each; "
                    "use fewer clients or a smaller base"
                )
            shares = np.exp(self.sigma * rng.standard_normal(len(owners)))
            sizes = self.base + np.floor(left * shares / max(shares.sum(), 1e-300)).astype(np.int64)
            for client, piece in zip(owners, cut(pool, sizes), strict=True):
                parts[client].append(piece)
        return [np.concatenate(pieces) for pieces in parts]


class Natural(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="natural"):
    """Every owner with at least `min_examples` is a client, or only `clients` of them, drawn at random.

    Examples keep their order in the data.
    """

    clients: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    min_examples: SomeExamples = 1

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client, in the order of the owners' numbers."""
        if dataset.groups is None:
            raise DataError("the data has no owners of examples; use another scheme than natural")
        all_parts = group(dataset.groups)
        parts = [part for part in all_parts if len(part) >= self.min_examples]
        if len(parts) < max(self.clients, 1):
            raise DataError(
                f"{len(parts)} of {len(all_parts)} owners have at least {self.min_examples} examples; "
                f"expected {max(self.clients, 1)} or more"
            )
        if self.clients:
            chosen = np.sort(rng.choice(len(parts), size=self.clients, replace=False))
            parts = [parts[index] for index in chosen]
        return parts


class Column(BasePartition, frozen=True, forbid_unknown_fields=True, tag_field="scheme", tag="column"):
    """Every value of `column` with at least `min_examples` is a client; clients are sorted by value.

    If there are more than `max_clients` (0: no limit), that many are drawn at random. Examples keep their order in the
    data. Names of clients are their values.
    """

    column: Annotated[str, msgspec.Meta(min_length=1)]
    min_examples: SomeExamples = 1
    max_clients: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the source reads for the partition."""
        return (self.column,)

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client, in the order of the values."""
        if self.column not in dataset.columns:
            found = f"it has {', '.join(dataset.columns)}" if dataset.columns else "its source reads no columns"
            owners = "" if dataset.groups is None else '; for the owners of the data use scheme = "natural"'
            raise DataError(f"column = {self.column!r}: the data has no such column; {found}{owners}")
        values = group(dataset.columns[self.column])
        parts = [part for part in values if len(part) >= self.min_examples]
        if not parts:
            raise DataError(
                f"column = {self.column!r}: none of {len(values)} values has {self.min_examples} examples; use a "
                "smaller min_examples"
            )
        if 0 < self.max_clients < len(parts):
            chosen = np.sort(rng.choice(len(parts), size=self.max_clients, replace=False))
            parts = [parts[index] for index in chosen]
        return parts


@runtime_checkable
class Partition(Protocol):
    """The `[simulation.partition]` table: the options of a partitioner, selected by the key `scheme`.

    `seed` replaces the seed of the simulation for the partition; None: it does not. A partition that reads columns of
    the data, `dataset.columns`, has their names in an attribute `columns`; sources read no others.
    """

    @property
    def seed(self) -> int | None:
        """The seed of the partition."""
        ...

    def split(self, dataset: Dataset, rng: np.random.Generator) -> list[Part]:
        """Return the examples of each client, as indices of the data set."""
        ...


PARTITIONS: Mapping[str, type[Partition]] = by_name(
    Iid, Shards, Dirichlet, Hsu, Quantity, Classes, FedProx, Natural, Column
)
"""The options record of each built-in partitioner, by its name in a simulation file."""

define(Kind("partitions", "scheme", "a partitioner", Partition, ("split",), PARTITIONS, BasePartition))
