"""Folders of images, read by Pillow (extra "images")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from fedplat.errors import DataError, MissingExtraError
from fedplat.extras import install_command
from fedplat.simulation.data.federation import Array, Dataset
from fedplat.simulation.data.sources import common

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_COMPANIONS = frozenset(
    {".aae", ".csv", ".htm", ".html", ".ini", ".json", ".jsonl", ".md", ".py", ".rst", ".toml", ".tsv", ".txt", ".xml"}
    | {".xmp", ".yaml", ".yml"}
)
"""The suffixes of texts beside images: captions, annotations, licences, edits of a photo."""
_COMPANION_NAMES = frozenset({"thumbs.db", "ehthumbs.db", "readme", "license", "licence", "makefile", "icon\r"})
"""Files of other names beside images, in small letters, such as those that an operating system creates."""
_GRAY = frozenset({"1", "L", "LA", "La", "I", "F"})
"""Pillow's modes of gray images, besides those of 16 bits ("I;16" and others)."""
_EIGHT_BITS, _SIXTEEN_BITS, _FLOATS = 255.0, 65535.0, 1.0
"""The largest value of a pixel."""
_SIGNED = 2
_BACKGROUNDS = {"white": 255, "black": 0}
Channels = Literal[0, 1, 3]
Background = Literal["", "white", "black"]
Size = Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=16_384)]], msgspec.Meta(min_length=2, max_length=2)]


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="source", tag="images"):
    """The images `path`/CLASS/FILE as float32 [n, channels, height, width]; `path` is relative to the simulation file.

    Classes are sorted by name. With `owners`, images are `path`/OWNER/CLASS/FILE, and each owner is a client. Images
    are converted to `channels` (1: gray, 3: RGB, 0: those of the first image), and to `size`, [height, width], if it is
    set. They are turned as their EXIF tag states. `test_path` is a folder of the same form; without it, `test_fraction`
    of the examples are held out. `scale` "unit" divides pixels by the largest of their format: 255, or 65,535 with 16
    bits; floats have to be in [0, 1]. Images with transparent pixels need a `background`. Left out are hidden files and
    folders, and what often lies beside images: texts such as .txt, .json or README, and Thumbs.db. All other files,
    and images elsewhere in `path`, are errors.
    """

    path: str
    test_path: str = ""
    test_fraction: common.Fraction = 0.2
    owners: bool = False
    channels: Channels = 0
    size: Size | None = None
    scale: common.Scale = "unit"
    background: Background = ""

    def load(self, place: common.SourcePaths) -> Dataset:
        """Load the data set. Raises `DataError`, and `MissingExtraError` without Pillow."""
        train = self._split(place.folder / self.path)
        test = self._split(place.folder / self.test_path) if self.test_path else None
        return common.make_dataset(train, test, (), place, self.test_fraction)

    def _split(self, folder: Path) -> common.Split:
        found, others = _list(folder, 3 if self.owners else 2)
        files = [file for file in found if _is_image(file) and file.is_file()]
        form = "OWNER/CLASS/FILE" if self.owners else "CLASS/FILE"
        if not files:
            raise DataError(f"{folder} has no images; expected {form} with a suffix such as .png or .jpg")
        _refuse_others(sorted({*found, *others} - set(files)), files, form)
        pixels = decode(files, len(files), lambda index: str(files[index]), self)
        targets = np.array([file.parent.name for file in files])
        owners = common.number_owners(np.array([file.parent.parent.name for file in files])) if self.owners else None
        return common.Split(pixels, targets, lambda index: str(files[index]), owners=owners)


def _list(folder: Path, depth: int) -> tuple[list[Path], list[Path]]:
    """Return what is at the depth of images, sorted, and the files above and below it; hidden names are left out."""

    def visible(place: Path, pattern: str) -> list[Path]:
        found = place.glob(pattern)
        return sorted(file for file in found if not any(map(common.is_hidden, file.relative_to(folder).parts)))

    found = visible(folder, "/".join("*" * depth))
    above = [file for level in range(1, depth) for file in visible(folder, "/".join("*" * level))]
    below = [file for each in found if each.is_dir() for file in visible(each, "**/*")]
    return found, [file for file in (*above, *below) if not file.is_dir()]


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _refuse_others(others: Sequence[Path], files: Sequence[Path], form: str) -> None:
    """Raise `DataError` for files that are not read and no companions, and for folders of classes without images."""
    for file in (each for each in others if not each.is_dir()):
        if _is_image(file) and file.is_file():
            raise DataError(f"{file} is an image in another folder; expected {form}: move it, or remove it")
        if file.suffix.lower() not in _COMPANIONS and file.name.casefold() not in _COMPANION_NAMES:
            raise DataError(
                f"{file} would be left out, since it is no file with the suffix of an image; expected only images such "
                "as .png or .jpg, and texts beside them: convert it, correct its name, or move it elsewhere"
            )
    with_images = {file.parent for file in files}
    depth = len(files[0].parents)
    for other in others:
        if len(other.parents) == depth and other.parent not in with_images:
            raise DataError(
                f"{other.parent} has no images, but {other.name}; expected images with a suffix such as .png or .jpg, "
                "or no such folder"
            )


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
    def scale(self) -> common.Scale:
        """The scale of pixels."""
        ...

    @property
    def background(self) -> Background:
        """The color behind transparent pixels; "" if no image has them."""
        ...


def decode(images: Iterable[Any], count: int, row: common.Row, options: ImageOptions) -> Array:
    """Return images as float32 [count, channels, height, width]; each is a path or an open file, which `row` names.

    Images are decoded one after the other into the result. Raises `DataError`, with the image's name, if one cannot be
    decoded or has another size than the first, and `MissingExtraError` without Pillow.
    """
    result, channels, first_peak = np.empty((0, 0, 0, 0), np.float32), options.channels, _EIGHT_BITS
    for index, file in enumerate(images):
        pixels, peak = _pixels(file, row(index), channels, options)
        if index == 0:
            height, width, channels = pixels.shape
            result, first_peak = np.empty((count, channels, height, width), np.float32), peak
        if pixels.shape[:2] != result.shape[2:]:
            first, other = list(result.shape[2:]), list(pixels.shape[:2])
            raise DataError(
                f"{row(index)} has the size {other}, and {row(0)} has {first}, [height, width]; convert all images to "
                f"one size, such as size = {first}"
            )
        if peak != first_peak and options.scale == "none":
            raise DataError(
                f"the pixels of {row(index)} are up to {peak:g}, and those of {row(0)} up to {first_peak:g}; expected "
                'images of one depth, or scale = "unit"'
            )
        result[index] = np.moveaxis(_scale(pixels, peak, options.scale), -1, 0)
    return result


def _scale(pixels: Array, peak: float, scale: common.Scale) -> Array:
    if peak == _EIGHT_BITS:
        return common.as_inputs(pixels, scale)
    return pixels / np.float32(peak) if scale == "unit" else pixels


def _pixels(file: Any, name: str, channels: int, options: ImageOptions) -> tuple[Array, float]:
    """Return the pixels of an image, [height, width, channels] (uint8, or float32 with more bits), and their peak."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            f"images need the package Pillow; install it with: {install_command('images')}"
        ) from exc
    try:
        with Image.open(file) as opened:
            _refuse_parts(opened, name, options.scale)
            is_signed, format_ = _is_signed(opened), opened.format
            image = ImageOps.exif_transpose(opened)
            if not channels:
                channels = 1 if image.mode in _GRAY or image.mode.startswith("I;16") else 3
            if image.mode[0] in "IF":
                converted, peak = _as_floats(image, format_, name, options.scale, is_signed)
            else:
                image = _without_alpha(image, name, options.background)
                converted, peak = image.convert("L" if channels == 1 else "RGB"), _EIGHT_BITS
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise DataError(f"{name} cannot be decoded as an image: {exc}") from exc
    if options.size is not None:
        converted = converted.resize((options.size[1], options.size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(converted).reshape(converted.height, converted.width, -1)
    return np.broadcast_to(pixels, (*pixels.shape[:2], channels)), peak


def _refuse_parts(opened: Any, name: str, scale: common.Scale) -> None:
    """Raise `DataError` for an image of which Pillow would only return a part."""
    if getattr(opened, "n_frames", 1) > 1 and opened.format != "MPO":  # the photo of a phone, and its preview
        raise DataError(f"{name} has {opened.n_frames} frames; expected an image in each file: write each to its own")
    arguments: Any = opened.tile[0][3] if opened.tile else ()
    is_wide = ";16" in str(arguments) or (opened.format == "PPM" and arguments[-1] > _EIGHT_BITS)
    if is_wide and opened.mode[0] not in "IF" and scale == "none":
        raise DataError(
            f"{name} has several channels of 16 bits, of which 8 are read, so its pixels would have another scale; "
            'expected scale = "unit"'
        )
    if _is_signed(opened) and opened.mode[0] not in "IF":
        raise DataError(f"{name} has negative pixels of 8 bits; expected pixels of 0 to 255: convert it")


def _is_signed(opened: Any) -> bool:
    """Return whether the pixels of a TIFF are signed: SampleFormat, tag 339."""
    return opened.format == "TIFF" and _SIGNED in opened.tag_v2.get(339, ())


def _as_floats(image: Any, format_: str | None, name: str, scale: common.Scale, is_signed: bool) -> tuple[Any, float]:
    """Return an image of one channel with more than eight bits as one of floats, and the largest value of its format.

    Pillow's own conversion to eight bits cuts off all values above 255.
    """
    from PIL import Image

    values = np.asarray(image)
    if image.mode == "I" and format_ == "TIFF" and not is_signed:  # Pillow has no mode of 32 bits without a sign
        values = values.astype(np.int32).view(np.uint32)
    values = values.astype(np.float32)
    if image.mode == "F":
        peak, low, high = _FLOATS, 0.0, 1.0
    elif image.mode.startswith("I;16") or format_ in ("PNG", "PPM"):
        peak, low, high = _SIXTEEN_BITS, 0.0, _SIXTEEN_BITS
    else:  # 32 bits, of which few are used
        peak, low, high = float("inf"), 0.0, 0.0
    if scale == "unit" and not (np.isfinite(peak) and low <= values.min() and values.max() <= high):
        raise DataError(
            f"{name} has pixels from {values.min():g} to {values.max():g} in the mode {image.mode!r}, which has no "
            'largest value to divide by; use scale = "none", or convert the images to 16 bits'
        )
    return Image.fromarray(values), peak


def _without_alpha(image: Any, name: str, background: Background) -> Any:
    """Return an image over the background. Raises `DataError` if it lacks one that it needs."""
    from PIL import Image

    if image.mode in ("La", "RGBa"):  # with colours that are multiplied by their alpha
        image = image.convert(image.mode.upper())
    if not image.has_transparency_data:
        return image
    whole = image.convert("RGBA")
    if whole.getextrema()[3][0] == int(_EIGHT_BITS):
        return image
    if not background:
        raise DataError(
            f'{name} has transparent pixels; expected a background for them: background = "white", or "black"'
        )
    behind = Image.new("RGBA", whole.size, (_BACKGROUNDS[background],) * 3 + (255,))
    flat = Image.alpha_composite(behind, whole).convert("RGB")
    return flat.convert("L") if image.mode == "LA" else flat
