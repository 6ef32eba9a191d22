"""The owner's privacy limit, for trainers that use `fedplat.pytorch.training` (extra "opacus")."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fedplat.errors import PrivacyLimitError
from fedplat.privacy.steps import StepCharge
from fedplat.pytorch.training import LocalOptions
from fedplat_client._state.privacy_ledger import PrivacyLimit
from fedplat_client.task import Task

_DEFAULT = "default"
_logger = logging.getLogger(__name__)


class TaskLedger:
    """The client's privacy ledger for one task, with the owner's limit if there is one."""

    def __init__(self, task: Task, limit: PrivacyLimit | None) -> None:
        self._task, self._limit = task, limit
        self._dataset = _DEFAULT if limit is None else limit.dataset

    def charge(self, planned: StepCharge) -> None:
        """Record steps permanently before they are made. Raises `PrivacyLimitError` and `DataDirectoryError`."""
        self._task.ledger.charge(self._dataset, self._task.job_id, planned, self._check_budget)

    def settle(self, planned: StepCharge, made: int) -> list[StepCharge]:
        """Refund the steps that were not made; return the job's cost so far. Raises `DataDirectoryError`."""
        unmade = StepCharge(planned.noise_multiplier, planned.sampling_probability, planned.num_steps - made)
        return self._task.ledger.settle(self._dataset, self._task.job_id, unmade)

    def _check_budget(self, charges: Sequence[StepCharge]) -> None:
        if self._limit is None:
            return
        from fedplat.pytorch.dp import epsilon

        after = epsilon(charges, self._limit.delta)
        if after <= self._limit.max_epsilon:
            return
        # Log the cost only here: this job's server must not learn the costs of other jobs.
        _logger.info("The training would exceed the privacy limit.", extra={"epsilon": after, "job": self._task.job_id})
        raise PrivacyLimitError(
            f"the training would exceed epsilon {self._limit.max_epsilon:g} at delta {self._limit.delta:g}, the limit "
            "of the data's owner; nothing was computed. Expected fewer steps, or more noise "
            "(config.dp_noise_multiplier)"
        )


def check_training(options: LocalOptions, limit: PrivacyLimit | None) -> None:
    """Raise `PrivacyLimitError` for a training that the owner does not allow, regardless of its cost."""
    if limit is None:
        return
    if not options.is_private:
        if limit.required:
            raise PrivacyLimitError(
                "the owner of the data allows private trainings only; expected config.dp, config.dp_noise_multiplier, "
                "config.dp_max_grad_norm and config.dp_delta"
            )
    elif options.dp_noise_multiplier < limit.min_noise_multiplier:
        raise PrivacyLimitError(
            f"config.dp_noise_multiplier = {options.dp_noise_multiplier:g}: expected at least "
            f"{limit.min_noise_multiplier:g}, the limit of the data's owner"
        )


def check_evaluation(limit: PrivacyLimit | None) -> None:
    """Raise `PrivacyLimitError` if the owner does not allow metrics without noise."""
    if limit is not None and limit.required and not limit.evaluates:
        raise PrivacyLimitError(
            "the owner of the data allows private trainings only, and the metrics of an evaluation have no noise; "
            "expected no [evaluation.clients]"
        )
