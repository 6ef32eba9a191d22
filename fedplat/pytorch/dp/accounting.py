"""Epsilon of private steps by Opacus' accountant, and a ledger in what a client remembers.

The accountant is that of Rényi differential privacy (Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the
Sampled Gaussian Mechanism", arXiv 1908.10530): an upper bound, some per cent above what PLD or PRV give, which takes
milliseconds for any number of steps, so that a client can ask before each training.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp as analysis

from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.privacy import steps
from fedplat.privacy.steps import StepCharge

_ORDERS = [*RDPAccountant.DEFAULT_ALPHAS, 80, 96, 128, 192, 256, 512]
_NOTE = "privacy"


def epsilon(charges: Iterable[StepCharge], delta: float) -> float:
    """Epsilon at delta of all steps together; 0 if there are none."""
    if not (grouped := steps.merge_charges(charges)):
        return 0.0
    each_kind = [each.num_steps * _of_step(each.noise_multiplier, each.sampling_probability) for each in grouped]
    # It means that another order would give a smaller epsilon; this one holds. The filter is set anew, since whoever
    # called may have filters of its own, and never removed: other threads train, too.
    warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha", category=UserWarning)
    found, _ = analysis.get_privacy_spent(orders=_ORDERS, rdp=np.sum(each_kind, axis=0).tolist(), delta=delta)
    return float(found)


@functools.lru_cache(maxsize=1024)
def _of_step(noise_multiplier: float, sampling_probability: float) -> npt.NDArray[np.float64]:
    """The Rényi divergences of one step, by order: those of steps add up."""
    found = analysis.compute_rdp(q=sampling_probability, noise_multiplier=noise_multiplier, steps=1, orders=_ORDERS)
    return np.asarray(found, np.float64)


class RecordedLedger:
    """A ledger in a client's memory of the job, for simulations.

    The count goes back with the memory when an update was not merged; a real client's ledger never does.
    """

    def __init__(self, memory: ClientState) -> None:
        self._memory = memory

    def charge(self, planned: StepCharge) -> None:
        """Notes steps; there is no limit."""
        self._note(steps.merge_charges(self._charges(), planned))

    def settle(self, planned: StepCharge, made: int) -> Sequence[StepCharge]:
        """Takes back what was not made; returns what was, of the whole job."""
        unmade = StepCharge(planned.noise_multiplier, planned.sampling_probability, planned.num_steps - made)
        charges = steps.taken_back(self._charges(), unmade)
        self._note(charges)
        return charges

    def _charges(self) -> list[StepCharge]:
        note = self._memory.get(_NOTE)
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
        self._memory.put(_NOTE, Parameters.from_arrays(columns))
