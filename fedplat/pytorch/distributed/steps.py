"""Long work of some ranks, for which the others wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fedplat import texts
from fedplat.errors import TrainingError
from fedplat.pytorch.distributed.group import Ranks

STEP_BYTES = 64 << 20
"""About how many bytes a step reads or writes: even a slow disk needs much less time than a collective may take."""
_logger = logging.getLogger(__name__)


def work_in_steps(ranks: Ranks, steps: Iterator[object], what: str) -> None:
    """Do work that may take longer than a collective in steps, after each of which all ranks meet.

    All ranks call it, with the same number of steps; those that wait for others have empty ones. If a step raises
    `OSError` on any rank, all ranks raise `TrainingError`; `what` names the result in errors.
    """
    is_done = False
    while not is_done:
        text = ""
        try:
            is_done = next(steps, ranks) is ranks
        except OSError as exc:
            _logger.exception("On this rank %s cannot be used.", what)
            text = texts.describe(exc)
        for rank, error in enumerate(ranks.all_gather(text.encode())):
            if error:
                raise TrainingError(f"{what} cannot be used on rank {rank}: {error.decode()}")
