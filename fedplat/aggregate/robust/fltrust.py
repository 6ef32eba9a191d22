"""FLTrust: updates are weighted by how well their direction agrees with the updates of trusted clients.

Source: Cao et al. 2021, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021 (arXiv
2012.13995), Algorithm 2: the trust score of an update is max(0, its cosine with the root update); each update is scaled
to the root update's length, and averaged with its score as weight.

In the paper the server trains the root update on its own data. Here no server data is needed: the root update is the
mean of the updates of the clients that the job trusts, identified by their ids. Labels cannot identify them, since
clients set their own labels. If no other update has a positive score, the result is the root update.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.model import Vector


class FLTrust(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="fltrust"):
    """Options of FLTrust. Raises `ValueError` for a value out of range."""

    trusted: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1000)]
    """Ids of the trusted clients."""

    def fewest(self, byzantine: int) -> int:
        """Return `byzantine` + 1: all updates may be arbitrary except one, of a trusted client."""
        return byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper. Its `gather` raises `ValueError` if there is no update of a trusted client."""
        trusted = frozenset(self.trusted)

        def reduce(inputs: RobustInputs) -> Vector:
            is_root = np.array([each.client_id in trusted for each in inputs.contributions])
            if not is_root.any():
                raise ValueError("there is no update of a client that robust.rule.trusted names; FLTrust needs one")
            root = is_root / is_root.sum()
            products = (inputs.rows.gram * root).sum(axis=1)  # of each update with the root update
            length = np.sqrt(max((products * root).sum(), 0.0))
            lengths = np.sqrt(np.diagonal(inputs.rows.gram))
            # An update of zeros has no direction, and a negative score counts as 0.
            useful = ~is_root & (lengths > 0) & (products > 0) & (length > 0)
            scores = np.where(useful, products, 0) / np.where(useful, lengths * length, 1)
            if not useful.any():
                return inputs.rows.weighted_sum(root)
            return inputs.rows.weighted_sum(scores * (length / np.where(useful, lengths, 1)) / scores.sum())

        return make_wrapper(reduce, before)
