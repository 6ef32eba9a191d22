"""FLTrust: updates count as far as they point where those of trusted clients point.

Source: Cao et al. 2021, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021 (arXiv
2012.13995), Algorithm 2: the trust score of an update is max(0, its cosine with the root update); each is scaled to
the root update's length, and averaged by its score.

In the paper the server trains the root update on its own data. This server has no data and runs no training code: the
root update is the mean of those of the clients that the job trusts by their ids. Not by a label: those are the clients'
own words. Where no other update has a positive score, the result is the root update.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.cohort import Mix, RobustInputs, gathering
from fedplat.model import Vector


class FLTrust(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="fltrust"):
    """Options of FLTrust. A value out of its range is a `ValueError`."""

    trusted: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1000)]
    """Ids of the clients whose updates are believed."""

    def fewest(self, byzantine: int) -> int:
        """The least number of updates of which so many may be byzantine: all but one trusted client's."""
        return byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """The rule. Its gather raises `ValueError` when no trusted client's update is there."""
        trusted = frozenset(self.trusted)

        def reduce(cohort: RobustInputs) -> Vector:
            is_root = np.array([each.client_id in trusted for each in cohort.contributions])
            if not is_root.any():
                raise ValueError("there is no update of a client that robust.rule.trusted names; FLTrust needs one")
            root = is_root / is_root.sum()
            products = (cohort.rows.gram * root).sum(axis=1)  # of each update with the root update
            length = np.sqrt(max((products * root).sum(), 0.0))
            lengths = np.sqrt(np.diagonal(cohort.rows.gram))
            # An update of zeros points nowhere; and a score is 0 or more.
            useful = ~is_root & (lengths > 0) & (products > 0) & (length > 0)
            scores = np.where(useful, products, 0) / np.where(useful, lengths * length, 1)
            if not useful.any():
                return cohort.rows.weighted_sum(root)
            return cohort.rows.weighted_sum(scores * (length / np.where(useful, lengths, 1)) / scores.sum())

        return gathering(reduce, before)
