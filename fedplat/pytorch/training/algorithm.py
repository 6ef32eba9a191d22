"""The checks of what the local algorithm of a plugin returns.

A built-in algorithm is called directly. The functions of a plugin may raise anything and return anything: `guard` turns
that into one sentence that names the algorithm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from fedplat.aggregate.local import (
    CONTROL,
    Arrays,
    Correction,
    LocalAlgorithm,
    LocalEnding,
    LocalStart,
    LossContext,
    LossFunction,
    StartContext,
    UpdateDirection,
)
from fedplat.config.user_code import wrap_errors
from fedplat.errors import ModelError, PluginError
from fedplat.local_options import LocalOptions


def check_drift(drift: Arrays, shapes: Mapping[str, torch.Size], key: str) -> None:
    """Raise `PluginError` if a drift is not one array for some of the parameters, each of its parameter's shape."""
    for name, array in drift.items():
        _check_shape(f"{key}: begin(): the drift", name, array, shapes)


def select_control(
    model: Mapping[str, torch.Tensor], names: Iterable[str], which: str = "the algorithm"
) -> dict[str, torch.Tensor]:
    """Return a model's control variates by the names of their tensors. Raises `ModelError` if the model has none."""
    names = list(names)
    if missing := [name for name in names if CONTROL + name not in model]:
        raise ModelError(
            f"the model has no tensor {CONTROL + missing[0]!r}, which {which} needs; expected a job whose aggregation "
            "rule adds it"
        )
    return {name: model[CONTROL + name] for name in names}


def build_guarded_algorithm(options: LocalOptions) -> LocalAlgorithm:
    """Return the local algorithm of a training, with `guard` if it is a plugin's.

    Raises `PluginError` or `UserCodeError` for an unusable plugin.
    """
    algorithm = options.build_algorithm()
    return algorithm if options.is_builtin else guard(algorithm, f'config.algorithm = "{options.algorithm_name}"')


def guard(algorithm: LocalAlgorithm, key: str) -> LocalAlgorithm:
    """Wrap the functions of a plugin: they raise `UserCodeError` or `PluginError` unless all results are usable.

    `key` is the key and the value of the file that name the plugin, for the message.
    """

    def begin(control: Arrays, remembered: Arrays) -> Correction:
        with wrap_errors(f"{key}: begin()"):
            correction: Any = algorithm.begin(control, remembered)
        _expect(correction, Correction, f"{key}: begin()")
        if not isinstance(correction.pull, float | int) or not math.isfinite(correction.pull):
            raise PluginError(f"{key}: begin(): the pull is {correction.pull!r}; expected a finite number")
        _check_arrays(f"{key}: begin(): the drift", correction.drift)
        return cast(Correction, correction)

    def end(correction: Correction, remembered: Arrays, direction: UpdateDirection) -> LocalEnding:
        with wrap_errors(f"{key}: end()"):
            ending: Any = algorithm.end(correction, remembered, direction)
        _expect(ending, LocalEnding, f"{key}: end()")
        _check_arrays(f"{key}: end(): the client state", ending.remember)
        _check_arrays(f"{key}: end(): the update", ending.update)
        shapes = {name: moved.shape for name, moved in direction.displacement.items()}
        controls = {CONTROL + name: shape for name, shape in shapes.items()} if algorithm.needs_control else {}
        for name, array in ending.update.items():
            _check_shape(f"{key}: end(): the update", name, array, {**shapes, **controls})
        return cast(LocalEnding, ending)

    return dataclasses.replace(
        algorithm,
        begin=begin,
        end=end,
        make_loss=_guard_loss(algorithm.make_loss, key) if algorithm.make_loss is not None else None,
        perturb=_guard_perturb(algorithm.perturb, key) if algorithm.perturb is not None else None,
        start=_guard_start(algorithm.start, key) if algorithm.start is not None else None,
    )


def _guard_start(begin: Callable[[StartContext], LocalStart], key: str) -> Callable[[StartContext], LocalStart]:
    def start_checked(context: StartContext) -> LocalStart:
        shapes = {name: tensor.shape for name, tensor in context.received.items()}
        with wrap_errors(f"{key}: start()"):
            start: Any = begin(context)
        _expect(start, LocalStart, f"{key}: start()")
        for what, arrays in (("the weights", start.weights), ("the exchange", start.exchange)):
            _check_arrays(f"{key}: start(): {what}", arrays)
            for name, array in arrays.items():
                _check_shape(f"{key}: start(): {what}", name, array, shapes)
            if missing := shapes.keys() - arrays.keys():
                raise PluginError(f"{key}: start(): {what} lack {min(missing)!r}; expected all received tensors")
        return cast(LocalStart, start)

    return start_checked


def _guard_loss(make: Callable[[LossContext], LossFunction], key: str) -> Callable[[LossContext], LossFunction]:
    def make_checked(context: LossContext) -> LossFunction:
        with wrap_errors(f"{key}: make_loss()"):
            compute: Any = make(context)
        if not callable(compute):
            raise PluginError(f"{key}: make_loss() returned a {type(compute).__name__}; expected a function")

        def compute_checked(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
            with wrap_errors(f"{key}: the loss"):
                result: Any = compute(module, inputs, targets)
            if not isinstance(result, tuple) or len(cast(tuple[object, ...], result)) != 2:
                raise PluginError(f"{key}: the loss returned a {type(result).__name__}; expected (loss, outputs)")
            loss, outputs = cast(tuple[Any, Any], result)
            if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
                raise PluginError(f"{key}: the loss is {_describe(loss)}; expected a scalar with a gradient")
            if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != targets.shape[:1]:
                raise PluginError(
                    f"{key}: the loss returned outputs that are {_describe(outputs)}; expected those of the module, "
                    f"for {len(targets)} examples"
                )
            if not loss.isfinite():
                raise PluginError(
                    f"{key}: the loss of a batch is {loss.item():g}; expected a finite number: check the algorithm, or "
                    "lower config.learning_rate"
                )
            return loss, outputs

        return compute_checked

    return make_checked


def _guard_perturb(perturb: Callable[[Arrays], Arrays], key: str) -> Callable[[Arrays], Arrays]:
    def perturb_checked(gradients: Arrays) -> Arrays:
        shapes = {name: gradient.shape for name, gradient in gradients.items()}
        with wrap_errors(f"{key}: perturb()"), torch.no_grad():
            offsets: Any = perturb(gradients)
        _check_arrays(f"{key}: perturb(): the offsets", offsets)
        for name, offset in offsets.items():
            _check_shape(f"{key}: perturb(): the offsets", name, offset, shapes)
        return cast(Arrays, offsets)

    return perturb_checked


def _expect(result: object, expected: type, where: str) -> None:
    if not isinstance(result, expected):
        raise PluginError(f"{where} returned a {type(result).__name__}; expected a {expected.__name__}")


def _check_arrays(where: str, arrays: Any) -> None:
    if not isinstance(arrays, Mapping):
        raise PluginError(f"{where}: found a {type(arrays).__name__}; expected tensors by name")
    for name, array in cast(Mapping[str, object], arrays).items():
        if not isinstance(array, torch.Tensor):
            raise PluginError(f"{where}: {name!r} is {_describe(array)}; expected a tensor")
        if not array.isfinite().all():
            raise PluginError(f"{where}: {name!r} has entries that are NaN or infinite; expected finite numbers")


def _check_shape(where: str, name: str, array: Any, shapes: Mapping[str, torch.Size]) -> None:
    if name not in shapes:
        raise PluginError(f"{where}: there is no parameter {name!r}; expected one of {', '.join(list(shapes)[:10])}")
    if array.shape != shapes[name]:
        raise PluginError(f"{where}: {name!r} has the shape {list(array.shape)}; expected {list(shapes[name])}")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else ", without a gradient")
    return f"of type {type(value).__name__}"
