"""Everything that reads foreign bytes: one function each, which raises only fedplat's own errors."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from fedplat import claims, codecs, report_validation
from fedplat.aggregate import state_from_bytes, state_to_bytes
from fedplat.codecs import Bf16, Eden, Plain, Quantize, TopK
from fedplat.codecs.container import Format, open_update
from fedplat.config.label_expressions import compile_expression
from fedplat.errors import FedplatError
from fedplat.job import parse_job
from fedplat.model import Parameters, VectorBlocks
from fedplat.model.file import FilePart
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import model_pb2
from fedplat_client.backoff import draw_s
from fedplat_server.config import Limits
from fedplat_server.messages import convert, validation
from hostile import attacks
from wire import make_golden

Target = Callable[[bytes], None]
BASE = attacks.MODEL
CARRYING = Parameters.from_arrays({"w": np.linspace(-3, 3, 70_000, dtype="f4"), "n": np.arange(3)}, "max")
OPTIONS = [record() for record in codecs.CODECS.values()]
CODECS = [
    options.build()
    for zstd in (False, True)
    for options in (
        Plain(zstd=zstd),
        Bf16(zstd=zstd),
        Quantize(bits=8, zstd=zstd),
        Quantize(bits=4, zstd=zstd),
        TopK(fraction=0.05, zstd=zstd),
        TopK(fraction=0.7, values="fp32", zstd=zstd),
        Eden(bits=1, zstd=zstd),
        Eden(bits=3, zstd=zstd),
    )
]
_FOLDER = tempfile.TemporaryDirectory(prefix="fedplat-fuzz-", ignore_cleanup_errors=True)
_LABELS: Mapping[str, str] = {"region": "eu", "memory_mb": "4096", "nan": "nan"}
_LIMITS = Limits()


def model(data: bytes) -> None:
    """A safetensors file: what an operator uploads, what a client downloads."""
    parameters = Parameters.from_bytes(data)
    assert parameters.schema.file_size_bytes >= 8
    assert Parameters.from_bytes(parameters.to_bytes()) == parameters or not parameters.is_finite()


def update(data: bytes) -> None:
    """An update that a client sends, against its base version."""
    base, path = Path(_FOLDER.name) / "base", Path(_FOLDER.name) / "update"
    if not base.exists():
        base.write_bytes(BASE.to_bytes())
    path.write_bytes(data)
    if isinstance(report_validation.validate_file(FilePart(path), base, None), float):
        taken = Parameters.from_bytes(data)
        assert taken.schema == BASE.schema
        assert np.isfinite(taken.to_vector()).all()


def encoded_update(data: bytes) -> None:
    """An encoded update that a client sends, against its base version, read with each codec."""
    base, path = Path(_FOLDER.name) / "carrying", Path(_FOLDER.name) / "encoded"
    if not base.exists():
        base.write_bytes(CARRYING.to_bytes())
    path.write_bytes(data)
    for options in OPTIONS:
        if isinstance(report_validation.validate_file(FilePart(path), base, options), float):
            taken = open_update(path, CARRYING, options)
            assert len(data) <= report_validation.size_limit(base, options)
            assert sum(block.size for block in taken.to_blocks()) == CARRYING.schema.num_floating
            for run in CARRYING.schema.segments:
                if run.dtype == "I64":
                    assert sum(part.size for part in taken.read_carried(run)) == run.count


def state(data: bytes) -> None:
    """The state of a server optimizer."""
    state_from_bytes(data)


def codec(data: bytes) -> None:
    """A compressed vector; the first byte selects the codec, the next two give the length."""
    head = data[:3].ljust(3, b"\0")
    vector = CODECS[head[0] % len(CODECS)].decode(data[3:], int.from_bytes(head[1:], "little"))
    assert sum(block.size for block in vector if np.isfinite(block).all()) == vector.size


def job_file(data: bytes) -> None:
    """A job file."""
    parse_job(_text(data))


def labels(data: bytes) -> None:
    """An expression over labels."""
    compile_expression(_text(data))(_LABELS)


def message(data: bytes) -> None:
    """A message of the protocol, with the checks that its text goes through."""
    for descriptor in make_golden.descriptors():
        with contextlib.suppress(DecodeError):
            decoded = make_golden.class_of(descriptor).FromString(data)
            decoded.SerializeToString()
    with contextlib.suppress(DecodeError):
        window = model_pb2.RetryWindow.FromString(data)
        assert 0.0 <= draw_s(window, random.Random(1)) <= 86_400.0


def fields(data: bytes) -> None:
    """The checks of texts, names and numbers that callers send."""
    text = _text(data)
    validation.text(text, 100)
    validation.wait_s(np.frombuffer(data[:8].ljust(8, b"\0"), np.float64)[0].item(), _LIMITS)
    convert.reason_from_wire(int.from_bytes(data[:4], "little"))  # pyright: ignore[reportArgumentType]
    for check in (
        lambda: validation.name(text, "population"),
        lambda: validation.digest(text),
        lambda: validation.key(text),
        lambda: validation.labels({text: text}, _LIMITS),
        lambda: validation.names([text], "trainer", _LIMITS),
        lambda: claims.check_metrics({text: 1.0}, _LIMITS.metrics),
    ):
        with contextlib.suppress(FedplatError):
            check()


def ticket(data: bytes) -> None:
    """A ticket, as a user pastes it."""
    read = Ticket.from_text(_text(data))
    assert Ticket.from_text(read.to_text()) == read
    assert repr(read).isprintable()


TARGETS: Mapping[str, Target] = {
    target.__name__: target
    for target in (model, update, encoded_update, codec, state, job_file, labels, message, fields, ticket)
}


def seeds(name: str) -> list[bytes]:
    """The inputs that mutation begins with: good ones, and those that were kept because they once did harm."""
    kept = sorted((Path(__file__).parent / "corpus" / name).glob("*"))
    return [*(path.read_bytes() for path in kept), *_GOOD[name]()]


def feed(name: str, data: bytes) -> None:
    """Gives an input to a target, which may refuse it."""
    with contextlib.suppress(FedplatError):
        TARGETS[name](data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _models() -> list[bytes]:
    good = [BASE.to_bytes(), Parameters.from_arrays({"n": np.ones(3, np.int64)}, "max").to_bytes()]
    header = {"w": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 8]}, "__metadata__": {"a": "b"}}
    text = json.dumps(header).encode()
    return [*good, len(text).to_bytes(8, "little") + text + bytes(8)]


def _encoded() -> list[bytes]:
    rng = np.random.default_rng(1)
    return [b"".join(Format(options, CARRYING.schema).encode(CARRYING, rng)) for options in OPTIONS]


def _payloads() -> list[bytes]:
    vector = np.random.default_rng(1).normal(0, 1, 300).astype(np.float32)
    head = vector.size.to_bytes(2, "little")
    return [
        bytes([number]) + head + b"".join(each.encode(VectorBlocks(vector), np.random.default_rng(1)))
        for number, each in enumerate(CODECS)
    ]


def _expressions() -> list[bytes]:
    return [
        b"region == 'eu' and memory_mb >= 4096",
        b"not (region in ['eu', 'us']) or 1 < memory_mb",
        b'region != "x" and (nan > 1.5e300 or nan == -1)',
    ]


_GOOD: Mapping[str, Callable[[], list[bytes]]] = {
    "model": _models,
    "update": _models,
    "encoded_update": _encoded,
    "state": lambda: [state_to_bytes({name: np.ones(4, np.float32) for name in "mv"}), b""],
    "codec": _payloads,
    "job_file": lambda: [
        make_golden.JOB_FILE.encode(),
        (make_golden.JOB_FILE + "[config]\nepochs = 5\nrate = 0.1\n[retry]\nbase_s = 1e9\n").encode(),
        Path(__file__).resolve().parents[2].joinpath("examples/digits/job.toml").read_bytes(),
    ],
    "labels": _expressions,
    "message": lambda: list(attacks.GOLDEN.values()),
    "ticket": lambda: [
        Ticket("fed.example.org:7443", "demo", "s" * 43, True, "-----BEGIN CERTIFICATE-----\n").to_text().encode(),
        Ticket("[::1]:7443", "a-population", "s" * 43).to_text().encode(),
    ],
    "fields": lambda: [b"demo", b"5f0c3a52-6d0f-4a83", b"a" * 64, "ünïcödé\n\x1b[2J\0".encode()],
}
