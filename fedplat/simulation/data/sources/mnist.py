"""MNIST: 60,000 handwritten digits of 28 x 28 pixels, and 10,000 test digits (LeCun et al. 1998)."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources.common import SourcePaths, find_data_file, read_arrays

_HOW_TO_GET = (
    "It has the uint8 arrays x_train, y_train, x_test and y_test; Keras publishes it: "
    "curl -O https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
)
_MEAN, _DEVIATION = 0.1307, 0.3081  # of the training images' pixels in [0, 1]


class Mnist(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="mnist"):
    """The file `mnist.npz` of the data folder, as float32 images [n, 1, 28, 28].

    `scale` is "unit" for pixels in [0, 1], or "standard" for mean 0 and deviation 1.
    """

    scale: Literal["unit", "standard"] = "unit"

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError` if the file is missing."""
        names = ("x_train", "y_train", "x_test", "y_test")
        arrays = read_arrays(find_data_file(place.data, "mnist.npz", _HOW_TO_GET), names)
        train, test = self._images(arrays["x_train"]), self._images(arrays["x_test"])
        return Dataset(train, arrays["y_train"].astype(np.int64), test, arrays["y_test"].astype(np.int64))

    def _images(self, pixels: Array) -> Array:
        images = pixels[:, np.newaxis].astype(np.float32)
        images /= np.float32(255.0)
        if self.scale == "standard":
            images -= np.float32(_MEAN)
            images /= np.float32(_DEVIATION)
        return images
