"""Example-level privacy: the gradients of single examples are right on this device, and what clipping costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedplat.errors import MissingExtraError, ModelError
from gpu.language_model import CausalModel
from gpu.lines import Check, Line, Measurement, Setting
from processes import NotInstalledError

NAME = "privacy"
MAX_ERROR = 1e-4
STEPS, WARM_UP = 8, 2
Clipping: TypeAlias = Literal["none", "flat", "ghost"]


def measure(setting: Setting) -> Iterator[Line]:
    """Check sums of gradients on a tiny model, then measure steps without and with clipping."""
    error = gradient_error(Setting(setting.device, is_small=True))
    yield Check(
        part=NAME,
        statement="sums of the gradients of single examples are those of a loop",
        passed=error < MAX_ERROR,
        found=f"relative error {error:.2g}",
    )
    module = CausalModel(setting).train()
    kinds: tuple[Clipping, ...] = ("none", "flat", "ghost")
    for kind in kinds:
        try:
            yield _measure_steps(setting, module, kind)
        except (ModelError, torch.OutOfMemoryError) as exc:
            yield Check(part=NAME, statement=f"steps with clipping {kind} run", passed=False, found=str(exc))


def gradient_error(setting: Setting) -> float:
    """Return the largest relative error of a sum of gradients of single examples, against a loop over them."""
    module = CausalModel(setting).train()
    dp = _load_dp()
    for name, value in module.named_parameters():
        if "lora_" in name:  # half of the adapters are zeros at first, and the gradients of the others, too
            nn.init.normal_(value, std=0.05)
    tokens = torch.randint(0, module.num_tokens, (6, 33), device=setting.device)
    with dp.clipping(module, cross_entropy, "flat", 1e6) as clipper:  # a bound that cuts nothing
        clipper.add(tokens[:, :-1], tokens[:, 1:])
        found = clipper.take()
    expected = [torch.zeros_like(each) for each in module.trained]
    for row in tokens:
        module.zero_grad()
        cross_entropy(module(row[None, :-1]), row[None, 1:]).backward()
        for total, each in zip(expected, module.trained, strict=True):
            assert each.grad is not None
            total += each.grad
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


def _measure_steps(setting: Setting, module: CausalModel, kind: Clipping) -> Measurement:
    dp = _load_dp()
    batch, length = (4, 32) if setting.is_small else (16, 256)
    tokens = torch.randint(0, module.num_tokens, (batch, length + 1), device=setting.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    setting.forget_peak()
    begin_s = 0.0
    with contextlib.nullcontext() if kind == "none" else dp.clipping(module, _loss, kind, 1.0) as clipper:
        for step in range(STEPS):
            if step == WARM_UP:
                begin_s = setting.now_s()
            if clipper is None:
                _loss(module(inputs), targets).backward()
                module.zero_grad()
            else:
                clipper.add(inputs, targets)
                clipper.take()
    rate = (STEPS - WARM_UP) * batch * length / (setting.now_s() - begin_s)
    work = f"gradients of a language model, {batch} examples of {length} tokens"
    shown = "not clipped" if kind == "none" else f"clipped, dp = {kind}"
    return Measurement(part=NAME, work=work, system=shown, value=rate, unit="tokens/s", peak_bytes=setting.peak_bytes())


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.float(), targets)


def _load_dp() -> ModuleType:
    try:
        from fedplat.pytorch import dp
    except MissingExtraError as exc:
        raise NotInstalledError(str(exc)) from exc
    return dp
