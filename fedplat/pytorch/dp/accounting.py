"""The epsilon of private steps by Opacus' accountant, and a ledger in the client state.

The accountant uses Rényi differential privacy (Mironov, Talwar and Zhang 2019, "Rényi Differential Privacy of the
Sampled Gaussian Mechanism", arXiv 1908.10530). Its epsilon is an upper bound, some per cent above that of PLD or PRV.
It takes milliseconds for any number of steps, so that a client can compute it before each training.
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
