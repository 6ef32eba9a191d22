"""What one GPU shows: offload, precision and recomputation there, layouts in turn, and moves between GPUs and CPUs.

The tests of several ranks, which need a GPU for each, are those of the other files with NCCL.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat.pytorch.parallel.profiling import read_trace
from support.model_parallel import divided, on_gpu, piped, pipedream
from support.model_parallel.divided import Case, Found
from support.ranks.backends import on_gpus
from support.ranks.group import RankGroup, Zygote

pytestmark = on_gpus(1)

POOL = "support.model_parallel.pool"
PEAKS = "support.model_parallel.on_gpu:measure_peaks"
CASES = {
    "plain": Case(),
    "offload": Case(layout="offload=cpu"),
    "clipped": Case(max_norm=0.3),
    "offload, clipped": Case(layout="offload=cpu", max_norm=0.3),
    "offload, adam": Case(layout="offload=cpu", optimizer="adam", epochs=3),
    "short": Case(epochs=2),
    "bf16": Case(layout="data=1", precision="bf16", epochs=2),
    "offload, bf16": Case(layout="offload=cpu", precision="bf16", epochs=2),
    "recompute": Case(layout="recompute=blocks"),
    "shard in turn": Case(layout="shard=2"),
    "data in turn": Case(layout="data=2"),
    "tensor in turn": Case(layout="tensor=2"),
    "pipeline in turn": Case(layout="pipeline=2,micro_batches=4"),
    "shard × pipeline in turn": Case(layout="shard=2,pipeline=2,micro_batches=4"),
}
NEAR = 1e-4
"""The largest difference of losses between a GPU and a CPU, which add up in other orders."""


@pytest.fixture(scope="module")
def gpu(zygote: Zygote) -> Generator[RankGroup]:
    """One rank with NCCL."""
    with zygote.group(1, BACKEND="nccl") as group:
        yield group


@pytest.fixture(scope="module")
def found(gpu: RankGroup) -> dict[str, Found]:
    """What it has found in each case."""
    call = "support.model_parallel.divided:run"
    [results] = gpu.call(call, cases=[msgspec.to_builtins(case) for case in CASES.values()])
    return dict(zip(CASES, msgspec.convert(results, list[Found]), strict=True))


@pytest.fixture(scope="module")
def on_cpu() -> list[float]:
    """The losses of a CPU."""
    with piped.alone("gloo") as ranks:
        return divided.run_one(ranks, CASES["plain"]).losses


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.epochs == 10 and not case.max_norm])
def test_losses_are_those_of_a_cpu(found: dict[str, Found], on_cpu: list[float], name: str) -> None:
    assert found[name].losses == pytest.approx(on_cpu, abs=NEAR)


@pytest.mark.parametrize(("name", "other"), [("offload", "plain"), ("offload, clipped", "clipped")])
def test_offload_changes_losses_by_rounding_only(found: dict[str, Found], name: str, other: str) -> None:
    assert found[name].losses == pytest.approx(found[other].losses, abs=1e-5)


def test_offloaded_state_is_on_the_host(found: dict[str, Found]) -> None:
    for name in ("offload", "offload, adam", "offload, bf16"):
        assert found[name].devices == ["cpu"]
    assert found["plain"].devices == ["cuda"]
    assert found["offload, adam"].moments == 2 * found["offload, adam"].weights


@pytest.mark.parametrize("name", ["bf16", "offload, bf16"])
def test_losses_in_bf16(found: dict[str, Found], name: str) -> None:
    assert found[name].losses == pytest.approx(found["short"].losses, abs=5e-3)
    assert found[name].losses != found["short"].losses


def test_offload_needs_memory_for_some_blocks_and_not_for_all(gpu: RankGroup) -> None:
    layouts = ["data=1", "offload=cpu"]
    peaks = {
        count: dict(
            zip(
                layouts,
                gpu.call(PEAKS, layouts=layouts, num_blocks=count, batch_size=16)[0],
                strict=True,
            )
        )
        for count in (6, 12)
    }
    in_blocks = {
        count: {name: size / on_gpu.BLOCK_BYTES for name, size in each.items()} for count, each in peaks.items()
    }
    print("peak of memory, in blocks of parameters:", in_blocks)
    for count in peaks:
        assert in_blocks[count]["data=1"] >= 4 * count  # parameters, gradients and two moments
    assert in_blocks[12]["offload=cpu"] < in_blocks[6]["offload=cpu"] + 0.5
    assert in_blocks[12]["offload=cpu"] < 10


def test_recomputation_needs_less_memory(gpu: RankGroup) -> None:
    layouts, num_blocks, batch_size = ["data=1", "recompute=blocks"], 6, 8192
    [(whole, recomputed)] = gpu.call(PEAKS, layouts=layouts, num_blocks=num_blocks, batch_size=batch_size)
    inner = 4 * batch_size * 2 * 4 * on_gpu.WIDTH  # the inputs of GELU and of the second layer
    print("peaks of memory, in activations inside of a block:", whole / inner, recomputed / inner)
    assert whole - recomputed > (num_blocks - 2) * inner


def test_pipedream_in_turn_has_the_weights_of_a_cpu(gpu: RankGroup) -> None:
    [on_one] = gpu.call("support.model_parallel.pipedream:train_layers", num_stages=3)
    with piped.alone("gloo") as ranks:
        expected = pipedream.train_layers(ranks, 3)
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(on_one["weights"][name], values, rtol=0, atol=1e-6, err_msg=name)
    assert {int(stage): count for stage, count in on_one["versions"].items()} == expected["versions"]


@pytest.mark.parametrize("layout", ["offload=cpu", "shard=2", "pipeline=2"])
def test_a_checkpoint_moves_between_a_gpu_and_cpus(gpu: RankGroup, zygote: Zygote, layout: str, tmp_path: Path) -> None:
    run: dict[str, Any] = {"layout": layout, "options": {"epochs": 6, "checkpoint_every": 4, "momentum": 0.9}}
    with zygote.group(1) as cpu:
        [[whole]] = cpu.call(f"{POOL}:train_all", runs=[run])
        for number, (first, second) in enumerate([(gpu, cpu), (cpu, gpu), (gpu, gpu)]):
            folder = str(tmp_path / str(number))
            first.call(f"{POOL}:train_all", runs=[{**run, "folder": folder, "stop_at": 6}])
            [[resumed]] = second.call(f"{POOL}:train_all", runs=[{**run, "folder": folder}])
            assert resumed["done"][0] == 5
            np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=1e-3, atol=NEAR)
            shutil.rmtree(folder)


def test_evaluations_are_those_of_a_cpu(gpu: RankGroup, zygote: Zygote) -> None:
    layouts = ["shard=2", "pipeline=2", "offload=cpu"]
    with zygote.group(1) as cpu:
        [expected] = cpu.call(f"{POOL}:evaluate_all", layouts=layouts)
    [scores] = gpu.call(f"{POOL}:evaluate_all", layouts=layouts)
    for found, each in zip(scores, expected, strict=True):
        assert found == pytest.approx(each, rel=NEAR)


def test_a_profile_has_the_kernels_of_each_pass(gpu: RankGroup, tmp_path: Path) -> None:
    call = "support.model_parallel.profiled:train"
    gpu.call(call, layouts=["shard=2", "recompute=blocks"], folder=str(tmp_path), profile=True)
    for layout in ("shard=2", "recompute=blocks"):
        content = json.loads((tmp_path / layout / "bottleneck.json").read_text())
        assert content["text"].startswith(f"the bottleneck is {content['bottleneck']}: ")
        print(content["text"])
        assert [sum(each.values()) for each in content["ranks"]] == pytest.approx([1.0])
        [trace] = (tmp_path / layout).glob("rank0.*.json")
        assert {"input", "forward", "backward", "update"} <= {span.activity for span in read_trace(trace).spans}
