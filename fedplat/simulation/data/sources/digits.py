"""1,797 handwritten digits of 8 x 8 pixels, a data set in scikit-learn."""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.errors import MissingExtraError
from fedplat.simulation.data.federation import Dataset
from fedplat.simulation.data.sources.common import Fraction, SourcePaths, hold_out


class Digits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="digits"):
    """Float32 images [n, 1, 8, 8] with pixels in [0, 1]; `test_fraction` of them are held out."""

    test_fraction: Fraction = 0.2

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `MissingExtraError` without scikit-learn."""
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as exc:
            raise MissingExtraError("the digits need scikit-learn; install it with: pip install scikit-learn") from exc
        pixels, labels = load_digits(return_X_y=True)
        images = (np.asarray(pixels) / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
        return hold_out(Dataset.from_arrays(images, np.asarray(labels, np.int64)), self.test_fraction, place.rng)
