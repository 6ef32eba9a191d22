"""Data sets of this machine in place of those that Flower's apps download: the same names, columns and types.

The values are random, with a pattern that a model can learn. `install` replaces the functions that download, in this
process only; the apps and the libraries' partitioners stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sqlite3
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib import request

import numpy as np
import numpy.typing as npt

NUM_TRAIN, NUM_TEST, LARGE = 600, 120, 501_000
NUM_DIGITS = 10_000
"""So many that each of ten clients tests with each digit, and in two batches of two processes, which apps need."""
Columns = dict[str, Any]
WORDS = ["film", "plot", "actor", "scene", "music", "story", "bad", "good", "fine", "dull", "long", "short"]


def install(folder: Path, source: str) -> None:
    """Replace what downloads data sets.

    `folder` is the parent of the app's working folder, `source` the text of the app's modules.
    """
    import datasets

    num_train = LARGE if "500_000" in source else NUM_TRAIN  # an app moves so many from training to testing
    num_digits = NUM_TRAIN if "fastai" in source else NUM_DIGITS  # its network for large pictures is slow
    datasets.load_dataset = functools.partial(load_dataset, num_train=num_train, num_digits=num_digits)  # pyright: ignore
    request.urlopen = _open_archive  # pyright: ignore[reportAttributeAccessIssue]
    _write_iris(folder / "data" / "client.csv")
    if "torchvision" in source or "fastai" in source:
        _replace_torchvision()
    if "keras.datasets" in source:
        _replace_keras()


def save_partition(folder: Path, node: int, name: str) -> Path:
    """Save the data of a node, as the apps for devices expect it, and return its folder."""
    path = folder / f"partition-{node}"
    if not path.exists():
        data = _build(name, NUM_TEST, node)
        data.train_test_split(test_size=0.2, seed=1).save_to_disk(path)
    return path


def write_database(folder: Path, node: int) -> str:
    """Write the measurements of a node to a database, and return its URL."""
    path = folder / f"measurements-{node}.db"
    if not path.exists():
        names = ["age", "bmi", "systolic_bp", "diastolic_bp", "ldl_cholesterol", "hba1c"]
        rows = np.random.default_rng(node).uniform(20, 90, (NUM_TEST, len(names)))
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(f"CREATE TABLE person_measurements ({', '.join(f'{name} REAL' for name in names)})")
            database.executemany("INSERT INTO person_measurements VALUES (?, ?, ?, ?, ?, ?)", rows.tolist())
            database.commit()
    return f"sqlite:///{path}"


def load_dataset(
    path: str,
    *_: Any,
    split: str | None = None,
    num_train: int = NUM_TRAIN,
    num_digits: int = NUM_DIGITS,
    **__: Any,
) -> Any:
    """Replace `datasets.load_dataset`. Raises `LookupError` for a data set that is not known here."""
    import datasets

    if path not in SETS:
        raise LookupError(f"the data set {path} has no local replacement in tests/conformance/local_data.py")
    sizes = {"train": num_digits if path == "ylecun/mnist" else num_train, "test": NUM_TEST}
    chosen = sizes if split is None else {split: sizes[split]}
    found: dict[Any, Any] = {name: _build(path, size, seed) for seed, (name, size) in enumerate(chosen.items())}
    return found[split] if split is not None else datasets.DatasetDict(dict(found))


def _build(path: str, size: int, seed: int) -> Any:
    import datasets

    columns = SETS[path](np.random.default_rng(seed), size)
    built = datasets.Dataset.from_dict(columns)
    for name in ("img", "image"):
        if name in columns:
            built = built.cast_column(name, datasets.Image())
    return built


def _images(rng: np.random.Generator, labels: npt.NDArray[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return pictures that are brighter the larger the label is."""
    from PIL import Image

    pixels = rng.integers(0, 40, (len(labels), *shape)) + labels.reshape(-1, *[1] * len(shape)) * 20
    return [Image.fromarray(each.astype(np.uint8)) for each in pixels]


def _cifar(rng: np.random.Generator, size: int) -> Columns:
    labels = rng.integers(0, 10, size)
    return {"img": _images(rng, labels, (32, 32, 3)), "label": labels}


def _mnist(rng: np.random.Generator, size: int) -> Columns:
    labels = rng.integers(0, 10, size)
    return {"image": _images(rng, labels, (28, 28)), "label": labels}


def _flowers(rng: np.random.Generator, size: int, names: list[str]) -> tuple[Columns, npt.NDArray[Any]]:
    species = rng.integers(0, 3, size)
    values = 2.0 + 1.5 * species[:, None] + rng.random((size, 4))
    return {name: values[:, column].astype(np.float64) for column, name in enumerate(names)}, species


def _numbered_iris(rng: np.random.Generator, size: int) -> Columns:
    columns, species = _flowers(rng, size, ["petal_length", "petal_width", "sepal_length", "sepal_width"])
    return {**columns, "species": species}


def _named_iris(rng: np.random.Generator, size: int) -> Columns:
    names = ["SepalLengthCm", "SepalWidthCm", "PetalLengthCm", "PetalWidthCm"]
    columns, species = _flowers(rng, size, names)
    kinds = np.array(["Iris-setosa", "Iris-versicolor", "Iris-virginica"])
    return {"Id": np.arange(size), **columns, "Species": kinds[species].tolist()}


def _higgs(rng: np.random.Generator, size: int) -> Columns:
    inputs = rng.normal(size=(size, 28)).astype(np.float32)
    return {"inputs": inputs, "label": (inputs[:, 0] > 0).astype(np.float32)}


CENSUS: Mapping[str, list[str]] = {
    "workclass": ["Private", "State-gov", "?"],
    "education": ["HS-grad", "Bachelors", "Masters"],
    "marital.status": ["Never-married", "Widowed", "Divorced"],
    "occupation": ["Sales", "Tech-support", "Craft-repair"],
    "relationship": ["Unmarried", "Husband", "Wife"],
    "race": ["White", "Black", "Other"],
    "sex": ["Female", "Male"],
    "native.country": ["United-States", "Cuba", "India"],
}


def _census(rng: np.random.Generator, size: int) -> Columns:
    names = ["age", "fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week"]
    columns: Columns = {name: rng.integers(1, 90, size) for name in names}
    columns |= {name: rng.choice(values, size).tolist() for name, values in CENSUS.items()}
    columns["income"] = np.where(columns["age"] > 45, ">50K", "<=50K").tolist()
    return columns


def _titanic(rng: np.random.Generator, size: int) -> Columns:
    sexes = rng.choice(["male", "female"], size)
    return {
        "Survived": (sexes == "female").astype(np.int64),
        "Pclass": rng.integers(1, 4, size),
        "Name": [f"Name, Mr. {number}" for number in range(size)],
        "Sex": sexes.tolist(),
        "Age": rng.uniform(1, 80, size),
        "Siblings/Spouses Aboard": rng.integers(0, 4, size),
        "Parents/Children Aboard": rng.integers(0, 4, size),
        "Fare": rng.uniform(5, 100, size),
    }


def _reviews(rng: np.random.Generator, size: int) -> Columns:
    return {"text": [" ".join(rng.choice(WORDS, 20)) for _ in range(size)], "label": rng.integers(0, 2, size)}


SETS: Mapping[str, Callable[[np.random.Generator, int], Columns]] = {
    "uoft-cs/cifar10": _cifar,
    "ylecun/mnist": _mnist,
    "zalando-datasets/fashion_mnist": _mnist,
    "hitorilabs/iris": _numbered_iris,
    "scikit-learn/iris": _named_iris,
    "jxie/higgs": _higgs,
    "scikit-learn/adult-census-income": _census,
    "julien-c/titanic-survival": _titanic,
    "stanfordnlp/imdb": _reviews,
}


def _write_iris(file: Path) -> None:
    """Write Fisher's data, whose histograms an app compares with known ones."""
    from sklearn.datasets import load_iris

    file.parent.mkdir(parents=True, exist_ok=True)
    load_iris(as_frame=True).frame.to_csv(file, index=False)  # pyright: ignore


def _open_archive(url: str, *_: Any, **__: Any) -> io.BytesIO:
    """Replace `urlopen`: return an archive with six folders of pictures, as MedNIST has."""
    if not url.endswith("MedNIST.tar.gz"):
        raise LookupError(f"{url} has no local replacement in tests/conformance/local_data.py")
    rng = np.random.default_rng(0)
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for label, name in enumerate(["AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT"]):
            for number, picture in enumerate(_images(rng, np.full(20, label), (64, 64))):
                content = io.BytesIO()
                picture.save(content, "jpeg")
                info = tarfile.TarInfo(f"MedNIST/{name}/{number:06}.jpeg")
                info.size = content.tell()
                content.seek(0)
                archive.addfile(info, content)
    written.seek(0)
    return written


def _replace_keras() -> None:
    import importlib

    def load_data() -> Any:
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 10, 2 * NUM_TRAIN)
        pixels = np.stack([np.asarray(each) for each in _images(rng, labels, (32, 32, 3))])
        return (pixels, labels[:, None]), (pixels[:NUM_TEST], labels[:NUM_TEST, None])

    importlib.import_module("tensorflow").keras.datasets.cifar10.load_data = load_data


def _replace_torchvision() -> None:
    """Replace `torchvision.datasets.CIFAR10`, if torchvision is installed."""
    try:
        datasets = _import_torchvision().datasets
    except ImportError:
        return

    class LocalCifar:
        def __init__(self, *_: Any, train: bool = True, transform: Any = None, **__: Any) -> None:
            size = 20 * NUM_TRAIN if train else NUM_TEST
            self._columns, self._transform = _cifar(np.random.default_rng(int(train)), size), transform

        def __len__(self) -> int:
            return len(self._columns["label"])

        def __getitem__(self, index: int) -> tuple[Any, int]:
            image = self._columns["img"][index]
            return (self._transform(image) if self._transform else image), int(self._columns["label"][index])

    datasets.CIFAR10 = LocalCifar


def _import_torchvision() -> Any:
    """Import torchvision, without its compiled functions if they are for another build of PyTorch."""
    import importlib

    import torch.library

    register = torch.library.register_fake
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        torch.library.register_fake = lambda *_, **__: lambda function: function  # pyright: ignore
        return importlib.import_module("torchvision")
    finally:
        torch.library.register_fake = register
