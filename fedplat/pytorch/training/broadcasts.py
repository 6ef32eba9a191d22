"""The search for a mistake that no exception shows: outputs [n, 1] compared with targets [n], each with each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fedplat.errors import ModelError

_DIFFERENCES = frozenset({"sub", "subtract", "rsub", "__sub__", "__rsub__"})
_ELEMENTWISE = _DIFFERENCES | frozenset(
    {"add", "mul", "multiply", "div", "divide", "true_divide", "pow", "float_power", "hypot", "xlogy", "maximum"}
    | {"minimum", "logaddexp", "pairwise_distance", "gaussian_nll_loss"}
)


class RefuseBroadcasts(TorchFunctionMode):
    """Refuses to compare outputs [n, 1] with targets [n]: PyTorch would compare each with each.

    That is looked for in `losses`, in differences of the outputs, and where a tensor that was computed from the outputs
    meets one that was computed from the targets: elsewhere it may be meant. So it may where the author added the
    dimension, as in `outputs.unsqueeze(1) - targets`.
    """

    def __init__(self, outputs: object, targets: torch.Tensor, losses: Collection[Any]) -> None:
        super().__init__()
        self._outputs, self._losses = outputs, losses
        # By `id`; the tensors stay here, so that no other gets the `id` of one.
        self._from_outputs = {id(each): each for each in _find_tensors(outputs)}
        self._from_targets = {id(targets): targets}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        pair = (*args, *(named[name] for name in ("input", "target", "other") if name in named))[:2]
        if len(pair) == 2 and all(isinstance(each, torch.Tensor) for each in pair) and self._is_compared(func, pair):
            _refuse(pair[0].shape, pair[1].shape)
        result = func(*args, **named)
        self._follow((*args, *named.values()), result)
        return result

    def _is_compared(self, func: Any, pair: Sequence[Any]) -> bool:
        name = getattr(func, "__name__", "")
        if func in self._losses or (name in _DIFFERENCES and any(each is self._outputs for each in pair)):
            return True
        one, other = (self._origins(each) for each in pair)
        return name in _ELEMENTWISE and {*one, *other} == {"outputs", "targets"} and one != other

    def _origins(self, value: object) -> set[str]:
        of_outputs, of_targets = id(value) in self._from_outputs, id(value) in self._from_targets
        return ({"outputs"} if of_outputs else set()) | ({"targets"} if of_targets else set())

    def _follow(self, arguments: Sequence[Any], result: object) -> None:
        """Note what a result was computed from, unless it has more dimensions."""
        if not isinstance(result, torch.Tensor):
            return
        for known in (self._from_outputs, self._from_targets):
            found = [each for each in arguments if id(each) in known]
            if any(result.ndim <= each.ndim for each in found):
                known[id(result)] = result


def _refuse(one: torch.Size, other: torch.Size) -> None:
    if len(one) != len(other) and one.numel() == other.numel() != torch.broadcast_shapes(one, other).numel():
        raise ModelError(
            f"the loss compares outputs {list(one)} with targets {list(other)}, each with each; expected equal "
            "shapes, such as outputs.squeeze(1)"
        )


def _find_tensors(outputs: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of outputs: of a dict, a tuple, or an object's attributes."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for each in cast(Mapping[Any, object], outputs).values():
            yield from _find_tensors(each)
    elif isinstance(outputs, list | tuple):
        for each in cast(Sequence[object], outputs):
            yield from _find_tensors(each)
    elif hasattr(outputs, "__dict__"):
        yield from (each for each in vars(outputs).values() if isinstance(each, torch.Tensor))
