"""Example-level privacy with Opacus (extra "opacus"): model validation, clipped gradients, noise and accounting.

Opacus computes and clips the gradients of single examples, rejects layers that have none, and does the accounting.
Noise and the draws of examples use a key stream (`fedplat.privacy.noise`). Opacus uses PyTorch's generator, which an
observer of enough of its numbers can predict, and whose seed has 32 bits on a CPU.
"""

from __future__ import annotations

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command

try:
    from fedplat.pytorch.dp.clipping import Clipper, Clipping, RecordedLedger, StepNoise, clipping, epsilon, make_noise
    from fedplat.pytorch.dp.clipping import check_model as check
except ImportError as exc:
    raise MissingExtraError(
        "example-level privacy (config.dp) needs Opacus, which is not installed; install it with: "
        + install_command("opacus")
    ) from exc

__all__ = ["Clipper", "Clipping", "RecordedLedger", "StepNoise", "check", "clipping", "epsilon", "make_noise"]
