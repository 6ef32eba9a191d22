"""Images of every mode are right or refused, turned as their EXIF tag states, and not those of hidden folders."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedplat.errors import DataError
from fedplat.simulation.data import federation, partitioners, sources
from support.simulation.tables import write_images

MODES = [
    ("png", np.linspace(2000, 60000, 20).astype(np.uint16), 65535.0),
    ("tif", np.linspace(2000, 60000, 20).astype(">u2"), 65535.0),
    ("pgm", np.linspace(2000, 60000, 20).astype(np.int32), 65535.0),
    ("tif", np.linspace(0, 1, 20).astype(np.float32), 1.0),
    ("png", np.arange(0, 200, 10).astype(np.uint8), 255.0),
]
ALL = partitioners.Iid(clients=1)


@pytest.mark.parametrize(("suffix", "ramp", "peak"), MODES)
@pytest.mark.parametrize("channels", [0, 1, 3])
def test_images_keep_their_depth(suffix: str, ramp: np.ndarray, peak: float, channels: Any, tmp_path: Path) -> None:
    (tmp_path / "images/cat").mkdir(parents=True)
    image = Image.fromarray(ramp.reshape(4, 5))
    image.save(tmp_path / f"images/cat/x.{suffix}")
    source = sources.Images("images", channels=channels, test_fraction=0.0)
    found = federation(source, ALL, folder=tmp_path).inputs
    assert found.shape == (1, channels or 1, 4, 5)
    for channel in found[0]:
        np.testing.assert_allclose(channel, ramp.reshape(4, 5) / peak, rtol=1e-6)
    raw = sources.Images("images", channels=channels, scale="none", test_fraction=0.0)
    found = federation(raw, ALL, folder=tmp_path).inputs
    np.testing.assert_allclose(found[0, 0], ramp.reshape(4, 5).astype(np.float32))
    small = sources.Images("images", size=[2, 2], test_fraction=0.0)
    assert federation(small, ALL, folder=tmp_path).inputs.std() > 0.1


def test_images_whose_values_have_no_meaning_are_refused(tmp_path: Path) -> None:
    def load(**options: Any) -> np.ndarray:
        return federation(sources.Images("images", test_fraction=0.0, **options), ALL, folder=tmp_path).inputs

    folder = tmp_path / "images/cat"
    folder.mkdir(parents=True)
    Image.fromarray(np.full((4, 5), 1000.0, np.float32)).save(folder / "x.tif")
    with pytest.raises(DataError, match=r"x.tif has pixels from 1000 to 1000 in the mode 'F', .* scale = \"none\""):
        load()
    assert load(scale="none").max() == 1000.0
    Image.fromarray(np.full((4, 5), 9, np.uint8)).save(folder / "y.png")
    with pytest.raises(
        DataError, match=r"pixels of .*y.png are up to 255, and those of .*x.tif up to 1; expected imag"
    ):
        load(scale="none")
    (folder / "x.tif").unlink()
    drawing = np.zeros((4, 5, 4), np.uint8)
    drawing[1:3, 1:3, 3] = 255
    Image.fromarray(drawing).save(folder / "y.png")
    with pytest.raises(DataError, match=r"y.png has transparent pixels; expected a background for them"):
        load()
    on_white = load(background="white")
    assert (on_white[0, :, 1, 1].max(), on_white[0, :, 0, 0].min()) == (0.0, 1.0)
    assert load(background="black").max() == 0.0
    drawing[..., 3] = 255  # no pixel is transparent
    drawing[..., 0] = 7
    Image.fromarray(drawing).save(folder / "y.png")
    np.testing.assert_allclose(load(scale="none")[0, :, 0, 0], [7, 0, 0])


def test_photos_are_turned_and_folders_of_tools_left_out(tmp_path: Path) -> None:
    pixels = write_images(tmp_path / "images", ["cat", ".ipynb_checkpoints", "@eaDir"], 1)
    (tmp_path / "images/cat/._0.png").write_bytes(b"a resource fork of macOS")
    tag = Image.Exif()
    tag[0x0112] = 6  # the camera was turned by 90 degrees
    Image.fromarray(pixels[0]).save(tmp_path / "images/cat/0.png", exif=tag)
    found = federation(sources.Images("images", test_fraction=0.0, scale="none"), ALL, folder=tmp_path)
    assert found.classes == ("cat",)
    np.testing.assert_array_equal(found.inputs[0], np.moveaxis(np.rot90(pixels[0], -1), -1, 0))
    for owner in ("zoe", ".Trash-1000"):
        write_images(tmp_path / "phones" / owner, ["cat"], 1)
    owners = sources.Images("phones", owners=True, test_fraction=0.0)
    assert federation(owners, None, folder=tmp_path).names == ("zoe",)


def test_hugging_face_images_of_sixteen_bits(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    ramp = np.linspace(2000, 60000, 20).astype(np.uint16).reshape(4, 5)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    columns = {"image": [str(tmp_path / "x.png")] * 2, "label": [0, 1]}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    rows.save_to_disk(str(tmp_path / "saved"))
    source = sources.HuggingFace("saved", scale="unit", test_fraction=0.0)
    found = federation(source, ALL, folder=tmp_path).inputs
    np.testing.assert_allclose(found[1, 0], ramp / 65535.0, rtol=1e-6)


def save(path: Path, pixels: np.ndarray, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def load_all(folder: Path, **options: Any) -> np.ndarray:
    return federation(sources.Images("images", test_fraction=0.0, **options), ALL, folder=folder).inputs


@pytest.mark.parametrize("suffix", ["gif", "tif", "png", "webp"])
def test_an_image_of_several_frames_is_refused(suffix: str, tmp_path: Path) -> None:
    pixels = np.arange(20, dtype=np.uint8).reshape(4, 5)
    more = Image.fromarray(pixels + np.uint8(9))
    save(tmp_path / f"images/cat/x.{suffix}", pixels, save_all=True, append_images=[more])
    with pytest.raises(DataError, match=rf"x.{suffix} has 2 frames"):
        load_all(tmp_path)


def test_images_that_would_be_left_out_are_refused(tmp_path: Path) -> None:
    pixels = np.arange(20, dtype=np.uint8).reshape(4, 5)
    save(tmp_path / "images/dog/x.png", pixels)
    save(tmp_path / "images/dog/.thumbnails/x.png", pixels)
    for name in ("README", "labels.JSON", "dog/x.txt", "dog/Thumbs.db", "dog/.DS_Store", "dog/desktop.ini"):
        (tmp_path / "images" / name).touch()
    assert len(load_all(tmp_path)) == 1
    other = tmp_path / "images/cat/x.txt"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(DataError, match=r"cat has no images, but x.txt"):
        load_all(tmp_path)
    other.unlink()
    save(tmp_path / "images/dog/more/y.png", pixels)
    with pytest.raises(DataError, match=r"more/y.png is an image in another folder; expected CLASS/FILE"):
        load_all(tmp_path)


@pytest.mark.parametrize("name", ["dog/x.jp2", "dog/x.npy", "dog/x.heic", "dog/x", "cat/x.jp2", "x.jp2", "dog/a/x.jp2"])
@pytest.mark.parametrize("is_owned", [False, True])
def test_a_file_that_is_no_image_is_refused(name: str, is_owned: bool, tmp_path: Path) -> None:
    folder = tmp_path / ("images/zoe" if is_owned else "images")
    save(folder / "dog/x.png", np.arange(20, dtype=np.uint8).reshape(4, 5))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with pytest.raises(
        DataError, match=rf"images/.*{name} would be left out, .* convert it, correct its name, or move"
    ):
        load_all(tmp_path, owners=is_owned)


def test_an_image_above_the_folders_of_classes_and_a_broken_link_are_refused(tmp_path: Path) -> None:
    pixels = np.arange(20, dtype=np.uint8).reshape(4, 5)
    save(tmp_path / "images/dog/x.png", pixels)
    save(tmp_path / "images/y.png", pixels)
    with pytest.raises(DataError, match=r"images/y.png is an image in another folder; expected CLASS/FILE: move it"):
        load_all(tmp_path)
    (tmp_path / "images/y.png").rename(tmp_path / "y.png")
    (tmp_path / "images/dog/z.png").symlink_to(tmp_path / "absent.png")
    with pytest.raises(DataError, match=r"z.png would be left out"):
        load_all(tmp_path)


def write_tiff(path: Path, pixels: np.ndarray, sample_format: int) -> None:
    """Write a plain TIFF of a type that Pillow does not write: an image of one row, of the format of tag 339."""
    width, bits, count = pixels.shape[0], pixels.itemsize * 8, pixels.shape[1]
    content, extra = pixels.tobytes(), struct.pack(f"<{count}H", *[bits] * count)
    tags = [(256, 1, width), (257, 1, 1), (259, 1, 1), (262, 1, 2 if count == 3 else 1), (273, 1, 8)]
    tags += [(258, count, bits if count == 1 else 8 + len(content)), (277, 1, count), (279, 1, len(content))]
    tags += [(339, 1, sample_format)]
    entries = b"".join(struct.pack("<HHII", tag, 3, number, value) for tag, number, value in sorted(tags))
    start = 8 + len(content) + len(extra)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"II*\0" + struct.pack("<I", start) + content + extra + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0"
    )


def test_tiffs_of_other_types_are_right_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "images/cat/x.tif"
    write_tiff(path, np.array([[1], [2**31], [2**32 - 2**10]], np.uint32), 1)
    assert load_all(tmp_path, scale="none").ravel().tolist() == [1, 2**31, 2**32 - 2**10]
    write_tiff(path, np.array([[-5], [2**20], [7]], np.int32), 2)
    assert load_all(tmp_path, scale="none").ravel().tolist() == [-5, 2**20, 7]
    write_tiff(path, np.array([[-5], [3], [7]], np.int8), 2)
    with pytest.raises(DataError, match=r"x.tif has negative pixels of 8 bits"):
        load_all(tmp_path)
    write_tiff(path, np.full((3, 3), 65535, np.uint16), 1)
    assert load_all(tmp_path).ravel().tolist() == [1.0] * 9
    with pytest.raises(DataError, match=r"several channels of 16 bits, of which 8 are read"):
        load_all(tmp_path, scale="none")
