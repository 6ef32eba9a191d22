"""FedEx-LoRA and FLoRA: products of factors, in tensors of the server's own that no client uploads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import Accumulator, Contribution, FedExLora, Flora
from fedplat.aggregate.factors import SCALING, add_product
from fedplat.errors import JobFileError, ModelError
from fedplat.job import parse_job
from fedplat.model import BLOCK, Parameters, Schema
from fedplat.model.file import FilePart
from fedplat.report_validation import size_limit, validate_content, validate_file
from fedplat.submission_checks import check_initial_model
from fedplat_client import TrainResult
from support.jobs import write_job

RNG = np.random.default_rng(7)
OUTPUTS, INPUTS, RANK = 300, 260, 4
A, B, PRODUCT = "layer.lora_A.default.weight", "layer.lora_B.default.weight", "server/layer.lora_BA.default.weight"
WEIGHTS = (400.0, 300.0, 200.0, 100.0)


def draw(*shape: int) -> npt.NDArray[np.float32]:
    return RNG.normal(size=shape).astype(np.float32)


def make_model(**more: Any) -> Parameters:
    """Factors, before and after other tensors; those of bfloat16 come after the server's in the model's vector."""
    coarse = draw(5).astype(ml_dtypes.bfloat16)
    return Parameters.from_arrays(
        {"head": draw(3), A: draw(RANK, INPUTS), "coarse": coarse, B: draw(OUTPUTS, RANK), **more}
    )


def make_updates(schema: Schema, step: float) -> list[Parameters]:
    return [
        Parameters.from_arrays(
            {spec.name: (step * draw(*spec.shape)).astype("f4" if spec.dtype == "F32" else ml_dtypes.bfloat16)
             for spec in schema.uploaded.tensors}
        )
        for _ in WEIGHTS
    ]  # fmt: skip


def aggregate(rule_options: FedExLora | Flora, base: Parameters, updates: Sequence[Parameters]) -> Parameters:
    rule = rule_options.build()
    accumulator = Accumulator(base.schema, rule)
    for update, weight in zip(updates, WEIGHTS, strict=True):
        accumulator.fold(update, Contribution(weight))
    return accumulator.finish(base, rule.init(base.schema.num_floating))[0]


def wide(parameters: Parameters, name: str) -> npt.NDArray[np.float64]:
    return parameters[name].astype(np.float64)


def mean(values: Sequence[Any]) -> Any:
    return sum(weight * value for weight, value in zip(WEIGHTS, values, strict=True)) / sum(WEIGHTS)


@pytest.mark.parametrize("step", [1.0, 1e-3])
@pytest.mark.parametrize("options", [FedExLora(scaling=2.0), Flora(scaling=2.0)])
def test_the_products_are_those_of_numpy(options: FedExLora | Flora, step: float) -> None:
    base = options.build().requirements.extend(make_model())
    assert base[SCALING].tolist() == [2.0]
    assert base[PRODUCT].shape == (OUTPUTS, INPUTS)
    assert OUTPUTS * INPUTS > BLOCK
    base = base.copy()
    base[PRODUCT] = draw(OUTPUTS, INPUTS)
    updates = make_updates(base.schema, step)
    result = aggregate(options, base, updates)
    deltas_a, deltas_b = ([wide(update, name) for update in updates] for name in (A, B))
    products = mean([b @ a for a, b in zip(deltas_a, deltas_b, strict=True)])
    if isinstance(options, FedExLora):
        expected = products - mean(deltas_b) @ mean(deltas_a)
        for name in (A, B):
            np.testing.assert_allclose(
                result[name], wide(base, name) + mean([wide(u, name) for u in updates]), atol=1e-6
            )
    else:
        expected = products + mean(deltas_b) @ wide(base, A) + wide(base, B) @ mean(deltas_a)
        for name in (A, B):
            np.testing.assert_array_equal(result[name], base[name])
    base[PRODUCT] = np.zeros((OUTPUTS, INPUTS))
    residual = wide(aggregate(options, base, updates), PRODUCT)  # alone, so that it is not rounded to the last one
    assert np.linalg.norm(residual - expected) <= 1e-6 * np.linalg.norm(expected)
    assert result[SCALING].tolist() == [2.0]
    np.testing.assert_allclose(result["head"], wide(base, "head") + mean([wide(u, "head") for u in updates]), atol=1e-6)
    assert np.array_equal(result["coarse"], base["coarse"]) == (step < 1)  # bfloat16 has 3 digits


def test_products_have_the_same_bits_however_they_are_cut() -> None:
    b, a = draw(37, 5), draw(5, 4001)
    whole = np.zeros(37 * 4001, np.float32)
    add_product(whole, b, a)
    parts = np.zeros_like(whole)
    for first in range(0, whole.size, 10_000):
        add_product(parts[first : first + 10_000], b, a, first)
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_allclose(whole, (b.astype(np.float64) @ a).reshape(-1), atol=1e-5)


def test_clients_upload_no_tensor_of_the_server(tmp_path: Path) -> None:
    base = FedExLora(scaling=2.0).build().requirements.extend(make_model())
    trained = base.copy()
    trained[A] += 1.0
    trained[PRODUCT] += 1.0
    (file := tmp_path / "base").write_bytes(base.to_bytes())
    expected = trained.uploaded.minus(base.uploaded)
    own = {name: array for name, array in trained.items() if not name.startswith("server/")}
    for given in (trained, own):
        result = TrainResult(parameters=given, num_examples=1)
        assert result.to_update(base) == expected
        difference = result.to_difference(base)
        assert difference is not None
        assert (
            bytes(difference.read(0, np.empty(1 << 20, np.uint8))) == expected.to_bytes()[: len(expected.schema.header)]
        )
        assert difference.size_bytes == len(expected.to_bytes())
    for delta in (trained, expected):
        assert TrainResult(delta=delta, num_examples=1).to_update(base).schema == expected.schema
    (sent := tmp_path / "update").write_bytes(expected.to_bytes())
    assert validate_file(FilePart(sent), file, None) == validate_content(expected.to_bytes(), file) == pytest.approx(
        np.sqrt(RANK * INPUTS)
    )  # fmt: skip
    assert size_limit(file, None) < 4 * len(expected.to_bytes()) + (1 << 21)
    refused = validate_content(trained.minus(trained).to_bytes()[:-8] + bytes(8), file)
    assert refused == 0.0
    (whole := tmp_path / "whole").write_bytes(trained.to_bytes())
    assert "is not part of the model" in str(validate_file(FilePart(whole), file, None))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": draw(3)}, "needs adapters: tensors MODULE.lora_A and MODULE.lora_B; the model has none"),
        ({A: draw(2, 3)}, f"tensor '{A}': the rule flora needs '{B}' too"),
        ({B: draw(2, 3), "x.lora_A": draw(1, 2), "x.lora_B": draw(2, 1)}, f"tensor '{B}': .*needs its lora_A too"),
        ({A: draw(2, 3), B: draw(3, 3)}, r"is \[2, 3\] and .* \[3, 3\]; expected \[r, inputs\], \[outputs, r\]"),
        ({A: draw(2, 3).astype(np.float16), B: draw(3, 2)}, "is F16; the rule flora needs factors of F32"),
        ({A: draw(2, 3), B: draw(3, 2), "x.lora_embedding_A": draw(2, 2)}, "expected no adapters of embeddings"),
        ({A: draw(2, 3), B: draw(3, 2), SCALING: draw(2)}, f"needs a tensor server/MODULE.lora_BA .*, and {SCALING}"),
    ],
)
def test_models_without_such_products_are_refused(tensors: dict[str, Any], message: str) -> None:
    requirements, model = Flora(scaling=2.0).build().requirements, Parameters.from_arrays(tensors)
    with pytest.raises(AssertionError, match=message):
        assert not requirements.explain_misfit(model.schema)
    if SCALING not in tensors:
        with pytest.raises(ModelError, match=message):
            requirements.extend(model)


def test_other_jobs_have_no_tensor_of_the_server() -> None:
    model = FedExLora(scaling=2.0).build().requirements.extend(make_model())
    with pytest.raises(ModelError, match=f"the tensor '{PRODUCT}' has the prefix server/ .*; expected another name"):
        check_initial_model(model, parse_job(write_job("plain")))
    check_initial_model(model, parse_job(write_job("exact", aggregation={"rule": "fedex_lora", "scaling": 2.0})))


def test_what_hides_or_changes_updates_is_refused() -> None:
    clipped = {"clip_norm": 1.0}
    parts: list[tuple[dict[str, Any], list[str]]] = [
        (
            {
                "mode": {"kind": "buffered", "concurrency": 4},
                "compression": {"uplink": {"codec": "bf16"}, "downlink": {"codec": "bf16"}},
                "robust": {"byzantine": 1, "rule": {"name": "median"}},
                "pool": {"ranks": 2},
                "updates": clipped,
            },
            ["mode.kind", "compression.uplink", "compression.downlink", "robust", "pool", "updates.clip_norm"],
        ),
        (
            {
                "updates": clipped,
                "secure_aggregation": {},
                "privacy": {"delta": 1e-6, "participation": "fixed", "noise_multiplier": 1.0},
            },
            ["secure_aggregation", "privacy"],
        ),
    ]
    rule = {"rule": "fedex_lora", "scaling": 2.0}
    for tables, names in parts:
        with pytest.raises(JobFileError) as refusal:
            parse_job(write_job("exact", aggregation=rule, **tables))
        (line,) = [each for each in str(refusal.value).splitlines() if each.startswith("aggregation.rule")]
        assert line.startswith('aggregation.rule = "fedex_lora": expected none of these: ')
        for name in names:
            assert f"{name}: " in line or f"{name}, " in line or f"{name} = " in line
    parse_job(write_job("exact", aggregation=rule, durability="memory"))
