"""Low-rank factors whose products the server aggregates: what FedEx-LoRA and FLoRA have in common.

An adapter changes the weight W of a layer to W + s B A, with the factors A [r, inputs] and B [outputs, r], and the
scaling s = α / r (Hu et al. 2021, arXiv 2106.09685). The mean of the clients' products is not the product of the mean
factors. A rule therefore keeps what is missing in a tensor of the server's own: for the factors `MODULE.lora_A.NAME`
and `MODULE.lora_B.NAME` the float32 tensor `server/MODULE.lora_BA.NAME` [outputs, inputs]. The weight of the layer is

    W + s (lora_BA + B A)

where clients add the term to the layer's output in float32. It must not be added to W: a base in bfloat16 or with
quantised weights would round most of it away. The shape [outputs, inputs] does not depend on how a layer stores its
weight (the transposed one of GPT-2's `Conv1D`).

The term has s only at the client. So that all clients have the same, the job states it, and the tensor
`server/lora_scaling` [1] carries it to the clients, which refuse to train with another one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.aggregate.algebra import ClientRequirements, Contribution, Partial, Rule, State
from fedplat.aggregate.mean import weighted_mean
from fedplat.errors import ModelError
from fedplat.model import FLOATING, SERVER, Blocks, Parameters, Schema, TensorSpec, Vector, VectorBlocks

SCALING = f"{SERVER}lora_scaling"
"""The server-owned tensor with the scaling of all adapters."""
_FACTOR_A = re.compile(r"(?P<before>(?:.*\.)?)lora_A(?P<after>|\.weight|\.[^.]+\.weight)")
_OTHER_ADAPTERS = re.compile(r"(?:.*\.)?(?:lora_embedding_[AB]|lora_magnitude_vector)(?:\..*)?")
_CHUNK = 1 << 16
"""Entries of a product that are computed at a time, which fit into a processor's cache."""


@dataclass(frozen=True)
class Factor:
    """A tensor of a model: its columns in the float32 vector of the model, and its first byte in the flat buffer.

    `sent` are its columns in the vector of an update, empty for a tensor of the server's own.
    """

    name: str
    shape: tuple[int, ...]
    columns: range
    sent: range
    offset: int


@dataclass(frozen=True)
class FactorPair:
    """The factors of one adapter, and the tensor of the server for their product."""

    a: Factor
    b: Factor
    product: Factor


@dataclass(frozen=True)
class FactorLayout:
    """The pairs of a model, and all tensors that its updates have."""

    pairs: tuple[FactorPair, ...]
    uploaded: tuple[Factor, ...]

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, schema: Schema) -> FactorLayout:
        """Return the layout of a model."""
        found: dict[str, Factor] = {}
        start = first = 0
        for tensor, offset in zip(schema.tensors, schema.offsets, strict=True):
            if tensor.dtype not in FLOATING:
                continue
            count, num_sent = tensor.count, 0 if tensor.name.startswith(SERVER) else tensor.count
            place, sent = range(start, start + count), range(first, first + num_sent)
            found[tensor.name] = Factor(tensor.name, tensor.shape, place, sent, offset)
            start, first = place.stop, sent.stop
        pairs = [
            FactorPair(found[a], found[b], found[product])
            for a, b, product in name_pairs(schema)
            if product in found and b in found
        ]
        return cls(tuple(pairs), tuple(factor for factor in found.values() if factor.sent))


def name_pairs(schema: Schema) -> Iterator[tuple[str, str, str]]:
    """Yield the names of both factors of each adapter, A and B, and of the server's tensor for their product."""
    for tensor in schema.tensors:
        if match := _FACTOR_A.fullmatch(tensor.name):
            before, after = match["before"], match["after"]
            if not before.startswith(SERVER):
                yield tensor.name, f"{before}lora_B{after}", f"{SERVER}{before}lora_BA{after}"


def factor_names(product: str) -> tuple[str, str]:
    """Return the names of both factors, A and B, of a tensor `server/MODULE.lora_BA...`."""
    before, _, after = product.removeprefix(SERVER).rpartition("lora_BA")
    return f"{before}lora_A{after}", f"{before}lora_B{after}"


def split_product_name(name: str) -> tuple[str, str]:
    """Return the path of the module and the name of the adapter to which a tensor `server/MODULE.lora_BA...` belongs.

    The second is "" if the module has one adapter without a name.
    """
    module, _, after = name.removeprefix(SERVER).rpartition("lora_BA")
    return module.removesuffix("."), after.removesuffix(".weight").removeprefix(".")


Finish: TypeAlias = Callable[[Partial, FactorPair, range, Vector], None]
"""Computes the step of some entries of the server's tensor of a pair, in place.

It is Σ p ΔB ΔA at first, the sum over the clients of the products of the changes; the weights p have the sum 1.
"""
_MEAN = weighted_mean()


def aggregate_products(finish: Finish, *, restarts: bool, scaling: float, name: str) -> Rule:
    """Return a rule with the mean of the updates, which also sums the products of the changes of both factors.

    If it `restarts`, the factors keep the values of the base version. `name` is that of the rule, for messages. For a
    model without adapters it is the mean.
    """
    requirements = ClientRequirements(
        extend=lambda model: _extend(model, scaling, name),
        misfit=lambda schema: _describe_misfit(schema, name),
        has_server_tensors=True,
    )
    apply = functools.partial(_apply, finish, restarts)
    return replace(_MEAN, fold=_fold, apply=apply, nonlinear=True, requirements=requirements)


def _fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    layout = _layout_of(partial)
    if layout is None:
        return _MEAN.fold(partial, update, contribution)
    vector = np.concatenate([np.empty(0, np.float32), *(block.copy() for block in update)])
    weighted = _MEAN.fold(Partial(np.zeros(vector.size, np.float32)), VectorBlocks(vector), contribution)
    for tensor in layout.uploaded:
        _take(partial.total, tensor.columns)[...] += _take(weighted.total, tensor.sent)
    for pair in layout.pairs:
        b, a = _take(weighted.total, pair.b.sent), _take(vector, pair.a.sent)
        product = _take(partial.total, pair.product.columns)
        add_product(product, b.reshape(pair.b.shape), a.reshape(pair.a.shape))
    return replace(partial, weight=partial.weight + weighted.weight, num_updates=partial.num_updates + 1)


def _apply(finish: Finish, restarts: bool, state: State, partial: Partial) -> tuple[Vector, State]:
    step, state = _MEAN.apply(state, partial)
    layout = _layout_of(partial)
    for pair in () if layout is None else layout.pairs:
        for factor in (pair.a, pair.b) if restarts else ():
            step[_overlap(partial, factor)[0]] = 0.0
        place, entries = _overlap(partial, pair.product)
        if entries:
            finish(partial, pair, entries, step[place])
    return step, state


def add_product(
    out: Vector, b: npt.NDArray[np.float32], a: npt.NDArray[np.float32], first: int = 0, sign: float = 1.0
) -> None:
    """Add entries of sign · b @ a to `out` in place: those of the flattened product that begin with `first`.

    Each entry is the sum over the rank in its order, so its bits depend neither on the machine nor on where the entries
    are cut, as those of a BLAS may.
    """
    num_columns = a.shape[1]
    rows_at_once = max(1, _CHUNK // max(1, num_columns))
    stop = first + out.size
    for row in range(first // max(1, num_columns), -(-stop // max(1, num_columns)), rows_at_once):
        rows = b[row : row + rows_at_once]
        product = np.zeros((len(rows), num_columns), np.float32)
        term = np.empty_like(product)
        for column in range(len(a)):
            np.multiply(rows[:, column, None], a[column], out=term)
            np.add(product, term, out=product)
        begin = row * num_columns
        part = product.reshape(-1)[max(first - begin, 0) : stop - begin]
        target = out[max(begin - first, 0) :][: part.size]
        (np.add if sign > 0 else np.subtract)(target, part, out=target)


def mean_of(partial: Partial, factor: Factor) -> npt.NDArray[np.float32]:
    """Return the mean change of a factor."""
    assert partial.whole is not None
    return _take(partial.whole, factor.columns).reshape(factor.shape) / np.float32(partial.weight)


def base_of(partial: Partial, factor: Factor) -> npt.NDArray[np.float32]:
    """Return a float32 factor in the base version."""
    assert partial.base is not None
    size = 4 * len(factor.columns)
    with partial.base.reader(size) as read:
        return read(factor.offset, size).view(np.float32).reshape(factor.shape).copy()


def _layout_of(partial: Partial) -> FactorLayout | None:
    """Return the layout of an attempt's model; None if the model has no factors."""
    layout = None if partial.schema is None else FactorLayout.of(partial.schema)
    return layout if layout is not None and layout.pairs else None


def _take(vector: Vector, columns: range) -> Vector:
    return vector[columns.start : columns.stop]


def _overlap(partial: Partial, tensor: Factor) -> tuple[slice, range]:
    """Return which entries of a slice of the total belong to a tensor, and which entries of the tensor these are."""
    start = max(tensor.columns.start, partial.first)
    stop = max(start, min(tensor.columns.stop, partial.first + partial.total.size))
    place = slice(start - partial.first, stop - partial.first)
    return place, range(start - tensor.columns.start, stop - tensor.columns.start)


def _extend(model: Parameters, scaling: float, name: str) -> Parameters:
    """Append the server's tensors to a model of adapters; a model that has them is returned unchanged."""
    if any(tensor.startswith(SERVER) for tensor in model):
        return model
    if problem := _describe_factors(model.schema, name):
        raise ModelError(problem)
    products = {
        product: np.zeros((model[b].shape[0], model[a].shape[1]), np.float32)
        for a, b, product in name_pairs(model.schema)
    }
    own = {**products, SCALING: np.array([scaling], np.float32)}
    return Parameters.from_arrays({**model, **own}, model.schema.carry)


def _describe_misfit(schema: Schema, name: str) -> str:
    """Return why a model does not fit the rule, or ""."""
    if problem := _describe_factors(schema.uploaded, name):
        return problem
    shapes = {tensor.name: tensor.shape for tensor in schema.tensors}
    expected = {TensorSpec(product, "F32", (shapes[b][0], shapes[a][1])) for a, b, product in name_pairs(schema)}
    expected.add(TensorSpec(SCALING, "F32", (1,)))
    if {tensor for tensor in schema.tensors if tensor.name.startswith(SERVER)} == expected:
        return ""
    return (
        f"the rule {name} needs a tensor {SERVER}MODULE.lora_BA for each adapter, and {SCALING}; `fedplat job submit` "
        "adds them to a model that has no tensor of these names"
    )


def _describe_factors(schema: Schema, name: str) -> str:
    """Return why the clients' tensors have no products that the rule could aggregate, or ""."""
    tensors = {tensor.name: tensor for tensor in schema.tensors}
    if schema.carry == "max" and any(tensor.dtype not in FLOATING for tensor in schema.tensors):
        return f'the rule {name} needs a model that keeps its integer entries (carry = "keep")'
    if other := next(filter(_OTHER_ADAPTERS.fullmatch, tensors), None):
        return (
            f"tensor {other!r}: the rule {name} aggregates the products of the factors lora_A and lora_B of linear "
            "layers; expected no adapters of embeddings, and no DoRA"
        )
    pairs = list(name_pairs(schema))
    if not pairs:
        return f"the rule {name} needs adapters: tensors MODULE.lora_A and MODULE.lora_B; the model has none"
    for a, b, _ in pairs:
        if b not in tensors:
            return f"tensor {a!r}: the rule {name} needs {b!r} too; expected clients that train and send both factors"
        shapes = tensors[a].shape, tensors[b].shape
        if not (len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][0] == shapes[1][1]):
            return f"tensor {a!r} is {list(shapes[0])} and {b!r} {list(shapes[1])}; expected [r, inputs], [outputs, r]"
        if wrong := next((each for each in (a, b) if tensors[each].dtype != "F32"), None):
            return f"tensor {wrong!r} is {tensors[wrong].dtype}; the rule {name} needs factors of F32"
    known = {each for pair in pairs for each in pair}
    for tensor in tensors:
        parts = tensor.split(".")
        if "lora_B" in parts and parts[-1] != "bias" and tensor not in known:
            return f"tensor {tensor!r}: the rule {name} needs its lora_A too; expected clients that send both factors"
    return ""
