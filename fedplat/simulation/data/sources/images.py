"""Folders of images, read by Pillow (extra "images")."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from fedplat.errors import DataError, MissingExtraError
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources.conversion import Row, Scale, Split, as_inputs, make_dataset
from fedplat.simulation.data.sources.paths import Fraction, SourcePaths, number_owners

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_GRAY = frozenset({"1", "L", "LA"})
"""Pillow's modes of gray images of at most eight bits."""
Channels = Literal[0, 1, 3]
Size = Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=16_384)]], msgspec.Meta(min_length=2, max_length=2)]


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="images"):
    """The images `path`/CLASS/FILE as float32 [n, channels, height, width]; `path` is relative to the simulation file.

    Classes are sorted by name. With `owners`, images are `path`/OWNER/CLASS/FILE, and each owner is a client. Images
    are converted to `channels` (1: gray, 3: RGB, 0: those of the first image), and to `size`, [height, width], if it is
    set. `test_path` is a folder of the same form; without it, `test_fraction` of the examples are held out. `scale`
    "unit" divides pixels by 255.
    """

    path: str
    test_path: str = ""
    test_fraction: Fraction = 0.2
    owners: bool = False
    channels: Channels = 0
    size: Size | None = None
    scale: Scale = "unit"

    def load(self, place: SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without Pillow."""
        train = self._split(place.folder / self.path)
        test = self._split(place.folder / self.test_path) if self.test_path else None
        return make_dataset(train, test, (), place, self.test_fraction)

    def _split(self, folder: Path) -> Split:
        files = sorted(folder.glob("*/*/*" if self.owners else "*/*"))
        files = [file for file in files if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not files:
            form = "OWNER/CLASS/FILE" if self.owners else "CLASS/FILE"
            raise DataError(f"{folder} has no images; expected {form} with a suffix such as .png or .jpg")
        pixels = decode(files, len(files), lambda index: str(files[index]), self)
        targets = np.array([file.parent.name for file in files])
        owners = number_owners(np.array([file.parent.parent.name for file in files])) if self.owners else None
        return Split(pixels, targets, lambda index: str(files[index]), owners=owners)


class ImageOptions(Protocol):
    """How images are converted; see `Images`."""

    @property
    def channels(self) -> Channels:
        """The number of channels, 0: that of the first image."""
        ...

    @property
    def size(self) -> Size | None:
        """The height and width, if images are resized."""
        ...

    @property
    def scale(self) -> Scale:
        """The scale of pixels."""
        ...


def decode(images: Iterable[Any], count: int, row: Row, options: ImageOptions) -> Array:
    """Return images as float32 [count, channels, height, width]; each is a path or an open file, which `row` names.

    Images are decoded one after the other into the result. Raises `DataError`, with the image's name, if one cannot be
    decoded or has another size than the first, and `MissingExtraError` without Pillow.
    """
    result, channels = np.empty((0, 0, 0, 0), np.float32), options.channels
    for index, file in enumerate(images):
        pixels = _pixels(file, row(index), channels, options.size)
        if index == 0:
            height, width, channels = pixels.shape
            result = np.empty((count, channels, height, width), np.float32)
        if pixels.shape[:2] != result.shape[2:]:
            first, other = list(result.shape[2:]), list(pixels.shape[:2])
            raise DataError(
                f"{row(index)} has the size {other}, and {row(0)} has {first}, [height, width]; convert all images to "
                f"one size, such as size = {first}"
            )
        result[index] = np.moveaxis(as_inputs(pixels, options.scale), -1, 0)
    return result


def _pixels(file: Any, name: str, channels: int, size: Size | None) -> Array:
    """Return the pixels of an image, uint8 [height, width, channels]."""
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            "images need the package Pillow; install it with: pip install 'fedplat[images]'"
        ) from exc
    try:
        with Image.open(file) as image:
            channels = channels or (1 if image.mode in _GRAY else 3)
            converted = image.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise DataError(f"{name} cannot be decoded as an image: {exc}") from exc
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(converted).reshape(converted.height, converted.width, channels)
