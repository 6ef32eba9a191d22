"""The base of a module whose other tensors are trained: it stays where it is, and is the same everywhere."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from fedplat import errors
from fedplat.pytorch import convert

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FrozenBase:
    """The tensors of a module that training does not change, by their names in its `state_dict`.

    Raises `ModelError` if nothing is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        state, changing = module.state_dict(), changing_tensors(module)
        ties = convert.find_tied_names(state)
        if not changing:
            raise errors.ModelError(
                f'share = "trained": no parameter of {type(module).__name__} is trained; expected some with '
                "requires_grad = True"
            )
        self._module, self._ties = module, ties
        self._tensors = {
            name: value for name, value in state.items() if name not in changing and ties.get(name) not in changing
        }
        self.names = frozenset(self._tensors)
        self._shapes = {name: value.shape for name, value in state.items() if name not in self.names}
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self._buffers = {name: _bytes_of(self._tensors[name]).clone() for name in self.names & buffers}
        self._versions = {name: self._tensors[name]._version for name in self.names - buffers}

    @property
    def _kind(self) -> str:
        return type(self._module).__name__

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of all names, types, shapes and values, in the order of the module's `state_dict`; in hex.

        A tensor with several names counts once, with its first one.
        """
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            if self._ties.get(name) in self._tensors:
                continue
            digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            digest.update(_bytes_of(tensor).numpy().data)
        return digest.hexdigest()

    def check_fit(self, values: Mapping[str, torch.Tensor]) -> None:
        """Raise `ModelError` unless the values are exactly those of the module's other tensors, with their shapes."""
        for name, value in values.items():
            if name in self.names:
                raise errors.ModelError(
                    f"the tensor {name!r} is not trained, so it belongs to the base, but the job's model has it; "
                    "expected a model of the trained tensors only, such as Learner.initial() returns"
                )
            expected = self._shapes.get(name)
            if expected != value.shape:
                found = "no such tensor" if expected is None else f"the shape {list(expected)}"
                raise errors.ModelError(
                    f"the tensor {name!r} has the shape {list(value.shape)} in the job's model; {self._kind} has "
                    f"{found} among those that are trained"
                )
        if missing := sorted(self._shapes.keys() - values.keys()):
            raise errors.ModelError(
                f"the job's model has no tensor {missing[0]!r}, which {self._kind} trains; expected all "
                f"{len(self._shapes)} tensors that are trained"
            )

    @property
    def has_changed(self) -> bool:
        """True if a tensor has changed since the base was made."""
        return bool(self._find_changed())

    def check_unchanged(self) -> None:
        """Raise `ModelError` if a tensor has changed since the base was made."""
        if changed := self._find_changed():
            raise errors.ModelError(
                f"the tensor {min(changed)!r} changed in the training, although it is not trained, and the job's model "
                'does not have it; expected share = "all", or a module that leaves it as it is'
            )

    def _find_changed(self) -> list[str]:
        state = self._module.state_dict()  # its tensors have the version of those of the module
        changed = [name for name, version in self._versions.items() if state[name]._version != version]
        # Buffers are small, and some are replaced, or changed and restored.
        return changed + [
            name for name, value in self._buffers.items() if not torch.equal(_bytes_of(state[name]), value)
        ]


def check_base(base: FrozenBase | None, expected: str, *, is_required: bool = False) -> None:
    """Raise `ModelError` unless a module has the base whose SHA-256 a job states; "" if it states none."""
    if not expected:
        if is_required and base is not None:
            raise errors.ModelError(explain_missing_base(base.sha256))
        return
    if base is None:
        raise errors.ModelError(
            f'config.base_sha256 = "{expected}": expected a learner or trainer with share = "trained", since a job of '
            "all tensors has no base"
        )
    if base.sha256 != expected:
        raise errors.ModelError(
            f'config.base_sha256 = "{expected}": the base here, all tensors that are not trained, has the SHA-256 '
            f"{base.sha256}; expected the same base on all participants"
        )


def explain_missing_base(sha256: str) -> str:
    """Return why a participant with a base refuses a job that states none."""
    return (
        "the job does not state the base that its model is for; expected base_sha256 in its [config]. The "
        f"one here has the SHA-256 {sha256}"
    )


def changing_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that training changes, by name: trained parameters, and the statistics of BatchNorm."""
    changing: dict[str, torch.Tensor] = {}
    changing |= {name: value for name, value in module.named_parameters() if value.requires_grad}
    for place, part in module.named_modules():
        if isinstance(part, BATCH_NORMS):
            changing |= {f"{place}.{name}" if place else name: value for name, value in part.named_buffers()}
    return changing


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any type on the CPU, shape [bytes]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
