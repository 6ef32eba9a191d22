"""The lines that the parts print, one JSON object each, and how they measure on a device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import torch


class Machine(msgspec.Struct, frozen=True, kw_only=True, tag="machine", tag_field="line"):
    """Where the following lines were measured. `versions` are those of the packages that are installed there."""

    gpu: str
    cores: int
    python: str
    versions: dict[str, str]

    def describe(self) -> str:
        """Return one line for the page."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.gpu}, {self.cores} cores, Linux, Python {self.python}, {versions}"


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag="measurement", tag_field="line"):
    """One number. `peak_bytes` is the most memory of the GPU that tensors had; None: not measured."""

    part: str
    work: str
    system: str
    value: float
    unit: str
    peak_bytes: int | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check", tag_field="line"):
    """Whether a statement about the device is true, with what was found."""

    part: str
    statement: str
    passed: bool
    found: str


class Problem(msgspec.Struct, frozen=True, kw_only=True, tag="problem", tag_field="line"):
    """Why a part, or the rest of it, was not measured: it failed, or what it needs is not installed."""

    part: str
    text: str
    is_failure: bool


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="line"):
    """The end of a part, and the seconds of its process."""

    part: str
    seconds: float


Line: TypeAlias = Machine | Measurement | Check | Problem | End
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode(line: Line) -> str:
    """Return a line without its end."""
    return msgspec.json.encode(line).decode()


def decode(text: str) -> Line:
    """Read a line."""
    return _decoder.decode(text)


@dataclass(frozen=True)
class Setting:
    """The device of a part, and whether it only has to start: with tiny models and few steps."""

    device: torch.device
    is_small: bool

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def now_s(self) -> float:
        """Return the time when the device has done all its work."""
        if self.is_on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def forget_peak(self) -> None:
        """Measure the peak memory from now on."""
        if self.is_on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the most memory of the GPU that tensors had; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_on_gpu else None
