"""Private gradients with Opacus: the check of a model, sums of clipped gradients, their noise, and the epsilon.

- `flat`: the whole gradient of an example is clipped to C (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1).
- `per_layer`: each of its L tensors is clipped to C/√L, which bounds the whole by C.
- `ghost`: as `flat`, with norms computed without the gradients themselves, in two backward passes: less memory
  (Li et al. 2022, "Large Language Models Can Be Strong Differentially Private Learners", arXiv 2110.05679, Section 4).

The loss of each example is computed on that example alone, whatever the loss function does with a batch. An example
with a gradient that is not finite counts as zero, so that it changes no more than any other.

The accountant uses Rényi differential privacy (Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the
Sampled Gaussian Mechanism", arXiv 1908.10530). Its epsilon is an upper bound, some per cent above that of PLD or PRV.
It takes milliseconds for any number of steps, so that a client can compute it before each training.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp as analysis
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from opacus.validators import ModuleValidator
from torch import nn

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.privacy import steps
from fedplat.privacy.noise import KEY_BYTES, Noise
from fedplat.privacy.steps import StepCharge

Clipping: TypeAlias = Literal["flat", "per_layer", "ghost"]
Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_UNUSED = (
    "{} has no gradient of single examples; expected each parameter to be used in every forward pass, by a layer that "
    "Opacus supports"
)


class Clipper(Protocol):
    """Sums the clipped gradients of examples."""

    def add(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add the clipped gradients of a batch of at least one example."""
        ...

    def take(self) -> list[torch.Tensor]:
        """Return the sum of each parameter's clipped gradients and reset it; zeros without examples."""
        ...


@contextmanager
def clipping(module: nn.Module, loss: Loss, kind: Clipping, max_norm: float) -> Generator[Clipper]:
    """Let the module compute gradients of single examples; restore it at the end of the block. Raises `ModelError`."""
    # Opacus' hooks need no gradient of the inputs. Set at each call and never removed: see `epsilon`.
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients", category=UserWarning)
    make = _Ghost if kind == "ghost" else _Sampled
    if kind == "ghost":
        _refuse_ties(module)
    try:
        clipper = make(module, _per_example(loss), kind, max_norm)
    except NotImplementedError as exc:
        reasons = "; ".join(str(each) for each in exc.args[0]).strip()
        raise ModelError(f"the model cannot be trained with example-level privacy. Opacus reports: {reasons}") from exc
    try:
        yield clipper
    finally:
        clipper.hooks.cleanup()
        _clean_up(module)


def _per_example(loss: Loss) -> Loss:
    """Return a function that computes the losses of single examples, each on its example alone."""

    def compute_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(output[None], target[None]).reshape(())

    vectorized, is_vectorizable = torch.func.vmap(compute_one, randomness="different"), True

    def compute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal is_vectorizable
        if is_vectorizable:
            try:
                return vectorized(outputs, targets)
            except RuntimeError:  # for example a loss with control flow that depends on values
                is_vectorizable = False
        pairs = zip(outputs.split(1), targets.split(1), strict=True)
        return torch.stack([loss(output, target).reshape(()) for output, target in pairs])

    return compute


class _Sampled:
    """Clips materialized gradients of single examples: `flat` and `per_layer`."""

    def __init__(self, module: nn.Module, losses: Loss, kind: Clipping, max_norm: float) -> None:
        self.hooks = GradSampleHooks(module, loss_reduction="sum")
        self._module, self._losses, self._check = module, losses, _NonzeroCheck(module)
        parameters = [each for each in module.parameters() if each.requires_grad]
        if kind == "flat":
            self._optimizer = _optimizer(DPOptimizer, parameters, max_norm)
        else:
            bounds = [max_norm / math.sqrt(len(parameters))] * len(parameters)
            self._optimizer = _optimizer(DPPerLayerOptimizer, parameters, bounds)

    def add(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._losses(_forward(self._module, inputs), targets).sum().backward()
        samples = [_sample(self._module, each, len(inputs)) for each in self._optimizer.params]
        for parameter, sample in zip(self._optimizer.params, samples, strict=True):
            self._check.see(parameter, sample)
        usable = torch.stack([each.flatten(1).isfinite().all(1) for each in samples]).all(0)
        if not usable.all():
            for sample in samples:
                sample[~usable] = 0.0
        self._optimizer.clip_and_accumulate()
        for each in self._optimizer.params:
            each.grad = each.grad_sample = None

    def take(self) -> list[torch.Tensor]:
        sums = _zeros(self._optimizer.params)
        for total, each in zip(sums, cast(list[Any], self._optimizer.params), strict=True):
            if each.summed_grad is not None:
                total.add_(each.summed_grad.view_as(total))
                each.summed_grad = None
        return sums


class _Ghost:
    """Clips by the norms of the gradients of single examples, without materializing the gradients."""

    def __init__(self, module: nn.Module, losses: Loss, kind: Clipping, max_norm: float) -> None:
        self.hooks = GradSampleHooksFastGradientClipping(
            module,
            loss_reduction="sum",
            max_grad_norm=max_norm,  # pyright: ignore[reportArgumentType]  # Opacus annotates it with the type of its default, an int
        )
        self._module, self._losses, self._check = module, losses, _NonzeroCheck(module)
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._sums = _zeros(self._parameters)

    def add(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        losses = self._losses(_forward(self._module, inputs), targets)
        try:
            losses.sum().backward(retain_graph=True)
        except (RuntimeError, ValueError) as exc:  # of Opacus' hooks
            raise ModelError(_describe_ghost(self._module, len(inputs), exc)) from exc
        try:
            factors = self.hooks.get_clipping_coef()
        except AttributeError as exc:  # a parameter without a norm
            raise ModelError(_UNUSED.format("some parameter")) from exc
        except RuntimeError as exc:  # norms of other lengths than the batch's
            raise ModelError(_describe_ghost(self._module, len(inputs), exc)) from exc
        norms = self.hooks.per_sample_gradient_norms
        _check_count("some parameter", len(norms), len(inputs))
        usable = norms.isfinite()
        if usable.all():
            self._add_clipped((factors * losses).sum())
        elif usable.any():
            self.add(inputs[usable], targets[usable])

    def _add_clipped(self, loss: torch.Tensor) -> None:
        for each in self._parameters:
            each.grad = None
        self.hooks.disable_hooks()
        loss.backward()
        self.hooks.enable_hooks()
        for total, each in zip(self._sums, self._parameters, strict=True):
            assert each.grad is not None
            self._check.see(each, cast(Any, each)._norm_sample)
            total.add_(each.grad)
            each.grad = None

    def take(self) -> list[torch.Tensor]:
        sums, self._sums = self._sums, _zeros(self._parameters)
        return sums


class _NonzeroCheck:
    """Compares gradients of single examples, or their norms, with those of PyTorch until neither is zero.

    Opacus computes no gradients of single examples for a weight without its hook (opacus issue 820). With zeros in
    their place the weight would keep its value, or be clipped by too small a norm, without an error.
    """

    def __init__(self, module: nn.Module) -> None:
        self._open = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def see(self, parameter: nn.Parameter, of_examples: torch.Tensor) -> None:
        """Compare those of a batch. Raises `ModelError` if those of the examples are missing."""
        if parameter not in self._open or parameter.grad is None or not parameter.grad.any():
            return  # the factor A of an adapter has no gradient while B is zero
        name = self._open.pop(parameter)
        if not of_examples.any():
            raise ModelError(
                f"the gradient of the parameter {name!r} is not zero, but Opacus computes zeros for all single "
                "examples; expected a layer that Opacus supports"
            )


def _optimizer(kind: type[Any], parameters: list[nn.Parameter], max_norm: float | list[float]) -> Any:
    """Create Opacus' optimizer; only its clipping is used."""
    inner = torch.optim.SGD(parameters, lr=1.0)
    return kind(inner, noise_multiplier=0.0, max_grad_norm=max_norm, expected_batch_size=None, loss_reduction="sum")


def _forward(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a module with the hooks of Opacus. Raises `ModelError` for what these refuse."""
    try:
        return module(inputs)
    except NotImplementedError as exc:
        raise ModelError(_describe_ghost(module, len(inputs), exc)) from exc
    except RuntimeError as exc:
        if "modified inplace" not in str(exc):
            raise
        raise ModelError(
            "the model cannot be trained with example-level privacy: it changes the outputs of a layer in place; use "
            "inplace=False, relu(x) for relu_(x), and x = x + y for x += y"
        ) from exc


def _sample(module: nn.Module, parameter: nn.Parameter, num_examples: int) -> torch.Tensor:
    """Return a parameter's gradients of single examples, [examples, ...]."""
    sample = cast(Any, parameter).grad_sample
    name = f"the parameter {next(name for name, each in module.named_parameters() if each is parameter)!r}"
    if not isinstance(sample, torch.Tensor):
        raise ModelError(_UNUSED.format(name))
    _check_count(name, len(sample), num_examples)
    if sample.ndim == 1:  # a scalar parameter: Opacus' optimizers need a dimension to compute norms along
        sample = cast(Any, parameter).grad_sample = sample[:, None]
    return sample


def _refuse_ties(module: nn.Module) -> None:
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(parameter, name)) != name:
            raise ModelError(
                f'dp = "ghost": {first!r} and {name!r} are one weight, and Opacus has no norms of its gradient for '
                'single examples; use dp = "flat", or separate weights'
            )


def _describe_ghost(module: nn.Module, num_examples: int, exc: Exception) -> str:
    """Return the text of an error of Opacus, with the name of the layer: one without a norm for each example."""
    layer = ""
    for name, parameter in module.named_parameters():
        norms = getattr(parameter, "_norm_sample", None)
        if norms is not None and len(norms) != num_examples:
            layer = f" of {name!r}"
    reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
    return (
        f'dp = "ghost": Opacus has no norms of the gradients{layer} for single examples, such as for a weight that is '
        'used twice, or a layer whose input has no dimension of examples; use dp = "flat", or another layer. Opacus '
        f"reports: {reason}"
    )


def _check_count(name: str, count: int, num_examples: int) -> None:
    """Raise `ModelError` if the gradients are not per example, such as for a layer with time in dimension 0."""
    if count != num_examples:
        raise ModelError(
            f"{name} has {count} gradients for a batch of {num_examples} examples; expected layers that keep examples "
            "in the first dimension, as with batch_first=True"
        )


def _zeros(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.zeros_like(each, requires_grad=False) for each in parameters]


def _clean_up(module: nn.Module) -> None:
    """Delete the attributes that Opacus leaves on a module if a training stops between forward and backward."""
    for part in module.modules():
        for name in ("activations", "max_batch_len"):
            if hasattr(part, name):
                delattr(part, name)
    for each in module.parameters():
        each.grad = None
        if hasattr(each, "summed_grad"):
            del cast(Any, each).summed_grad


class StepNoise:
    """Draws of examples and noise; never repeats a number."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._drawn = self._added = 0

    def draw_examples(self, num_examples: int, probability: float) -> npt.NDArray[np.int64]:
        """Draw the examples of a step, each independently with this probability; the result may be empty."""
        if probability >= 1.0:
            return np.arange(num_examples)
        numbers = self._noise.normal("draws", self._drawn, num_examples)
        self._drawn += num_examples
        return np.flatnonzero(numbers < NormalDist().inv_cdf(probability))

    def add_noise(self, total: torch.Tensor, deviation: float) -> torch.Tensor:
        """Return a tensor with noise of standard deviation `deviation` added to each entry, as float64 on the CPU.

        A later rounding to float32 removes the last bits of the noise, which the attack of Mironov 2012, "On
        Significance of the Least Significant Bits for Differential Privacy", uses.
        """
        numbers = self._noise.normal("noise", self._added, total.numel())
        self._added += total.numel()
        return total.cpu().double() + deviation * torch.from_numpy(numbers).view(total.shape)


def make_noise(seed: int | None) -> StepNoise:
    """Return the randomness of a seed, for simulations; without one, that of the operating system, unrepeatable."""
    if seed is None:
        return StepNoise(Noise(os.urandom(KEY_BYTES)))
    return StepNoise(Noise(hashlib.sha256(f"private training {seed}".encode()).digest()))


_MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that combine the examples of a batch even if their parameters are not trained."""
_SENTENCES = 2
"""Sentences to quote of Opacus' reason; the rest is about its own releases."""


def check_model(module: nn.Module) -> None:
    """Raise `ModelError`, with the reason and a replacement, for a layer that Opacus cannot handle.

    A `forward` that combines the examples of a batch is not detected: it has no privacy guarantee.
    """
    module.train()
    for name, part in module.named_modules():
        if not isinstance(part, _MIXING) and not any(each.requires_grad for each in part.parameters()):
            continue
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ModelError(
                f"the model cannot be trained with example-level privacy: its layer {name!r} has max_norm, which "
                "scales the rows that examples use, without noise; use max_norm=None"
            )
        validator = ModuleValidator.VALIDATORS.get(type(part))
        if reasons := validator(part) if validator is not None else []:
            raise ModelError(f"{_describe_problem(name, part)}. Opacus reports: {_shorten(str(reasons[0]))}")


def _describe_problem(name: str, part: nn.Module) -> str:
    kind, layer = type(part).__name__, f"its layer {name!r}" if name else "the module"
    problem = f"the model cannot be trained with example-level privacy: {layer} is {kind}"
    fixer = ModuleValidator.FIXERS.get(type(part))
    if fixer is None:
        return f"{problem}; expected another layer"
    replacement = " ".join(str(fixer(part)).split())
    return f"{problem}; use {replacement}, as opacus.validators.ModuleValidator.fix(module) does"


def _shorten(reason: str) -> str:
    sentences = " ".join(reason.split()).split(". ")
    return ". ".join(sentences[:_SENTENCES]).removesuffix(".") + "."


_ORDERS = [*RDPAccountant.DEFAULT_ALPHAS, 80, 96, 128, 192, 256, 512]
_NOTE = "privacy"


def epsilon(charges: Iterable[StepCharge], delta: float) -> float:
    """Return epsilon at `delta` of all steps together; 0 without charges."""
    if not (grouped := steps.merge_charges(charges)):
        return 0.0
    each_kind = [
        each.num_steps * _step_divergences(each.noise_multiplier, each.sampling_probability) for each in grouped
    ]
    # The warning means that another order would give a smaller epsilon; this one is valid. The filter is set at each
    # call, since the caller may have changed the filters, and never removed, since other threads may be training.
    warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha", category=UserWarning)
    total, _ = analysis.get_privacy_spent(orders=_ORDERS, rdp=np.sum(each_kind, axis=0).tolist(), delta=delta)
    return float(total)


@functools.lru_cache(maxsize=1024)
def _step_divergences(noise_multiplier: float, sampling_probability: float) -> npt.NDArray[np.float64]:
    """Return the Rényi divergences of one step, by order; those of several steps add up."""
    divergences = analysis.compute_rdp(
        q=sampling_probability, noise_multiplier=noise_multiplier, steps=1, orders=_ORDERS
    )
    return np.asarray(divergences, np.float64)


class RecordedLedger:
    """A ledger in the client state of a job, for simulations.

    It is rolled back with the client state when an update is not merged; a real client's ledger never is.
    """

    def __init__(self, client_state: ClientState) -> None:
        self._client_state = client_state

    def charge(self, planned: StepCharge) -> None:
        """Record the steps; there is no limit."""
        self._note(steps.merge_charges(self._charges(), planned))

    def settle(self, planned: StepCharge, made: int) -> Sequence[StepCharge]:
        """Refund the steps that were not made; return the charges of the whole job."""
        unmade = StepCharge(planned.noise_multiplier, planned.sampling_probability, planned.num_steps - made)
        charges = steps.drop_charges(self._charges(), unmade)
        self._note(charges)
        return charges

    def _charges(self) -> list[StepCharge]:
        note = self._client_state.get(_NOTE)
        if note is None:
            return []
        columns = (note[name].tolist() for name in StepCharge.__struct_fields__)
        return [StepCharge(*values) for values in zip(*columns, strict=True)]

    def _note(self, charges: Sequence[StepCharge]) -> None:
        columns = {
            "noise_multiplier": np.array([each.noise_multiplier for each in charges], np.float64),
            "sampling_probability": np.array([each.sampling_probability for each in charges], np.float64),
            "num_steps": np.array([each.num_steps for each in charges], np.int64),
        }
        self._client_state.put(_NOTE, Parameters.from_arrays(columns))
