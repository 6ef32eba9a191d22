"""Real ranks that divide a model, on Gloo: tensor and sharded ranks, and their products, against one process."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fedplat.pytorch.distributed import join_group
from fedplat.pytorch.parallel.divided_module import materialize
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel import divided, piped
from support.model_parallel.divided import Case, Found
from support.model_parallel.llama import LAYERS, WIDTH, Llama
from support.model_parallel.measured import Cases
from support.ranks.backends import backends, bound
from support.ranks.group import Zygote

UNITS = LAYERS + 1
OF_TWO = {
    "tensor": Case(layout="tensor=2", measure=True),
    "sequence": Case(layout="tensor=2,sequence=true"),
    "sequence, clipped": Case(layout="tensor=2,sequence=true", max_norm=0.3, epochs=3),
    "tensor, recomputed": Case(layout="tensor=2,sequence=true,recompute=blocks", epochs=3),
    "tensor, tied": Case(layout="tensor=2", model="tied", epochs=3),
    "tensor, frozen": Case(layout="tensor=2,sequence=true", model="frozen", epochs=3),
    "tensor, bf16": Case(layout="tensor=2", precision="bf16", epochs=2),
    "shard": Case(layout="shard=2"),
    "data": Case(layout="data=2", epochs=3),
    "clipped": Case(layout="shard=2", max_norm=0.3, epochs=3),
    "dropout": Case(layout="shard=2", model="dropout", epochs=3),
    "uneven": Case(layout="shard=2", num_examples=21, epochs=3),
    "tied": Case(layout="shard=2", model="tied", epochs=3),
    "frozen": Case(layout="shard=2", model="frozen", epochs=3),
    "adam": Case(layout="shard=2", optimizer="adam", epochs=3),
    "measured": Case(layout="shard=2", optimizer="adam", epochs=3, measure=True),
    "gathered once": Case(layout="shard=2,reshard=false", optimizer="adam", epochs=3, measure=True),
    "offloaded": Case(layout="shard=2,offload=cpu", optimizer="adam", epochs=3),
    "recomputed": Case(layout="shard=2,recompute=blocks", optimizer="adam", epochs=3, measure=True),
    "recomputed dropout": Case(layout="shard=2,recompute=blocks", model="dropout", epochs=3),
    "bf16": Case(layout="shard=2", precision="bf16", epochs=2),
}
OF_FOUR = {
    "shard": Case(layout="shard=4", optimizer="adam", epochs=3),
    "hybrid": Case(layout="shard=2,tensor=2", max_norm=0.3, epochs=3),
    "hybrid, sequence": Case(layout="shard=2,tensor=2,sequence=true,recompute=blocks", max_norm=0.3, epochs=3),
    "replicas": Case(layout="data=2,shard=2", max_norm=0.3, epochs=3),
    "replicas, tensor": Case(layout="data=2,tensor=2,sequence=true", max_norm=0.3, epochs=3),
}
WITH_LESS = ("sequence", "hybrid")
"""Another case has all that these have, and more."""


class Measured(Cases[str, Found]):
    """What each rank of a group finds in each case."""

    def compare(self, name: str, expected: Found, on_cpus: float = 1e-5) -> None:
        """Compare the losses of all ranks with those of one process."""
        for found in self[name]:
            assert found.losses == pytest.approx(expected.losses, abs=bound(self.backend, on_cpus))

    def compare_bits(self, name: str, expected: Found) -> None:
        """Compare the bits of rank 0, on CPUs."""
        self.compare(name, expected)
        if self.backend == "gloo":
            assert (self[name][0].losses, self[name][0].digest) == (expected.losses, expected.digest)


@contextmanager
def measure(zygote: Zygote, count: int, backend: str, cases: dict[str, Case]) -> Generator[Measured]:
    """What the ranks of a new group find in the cases that are asked for."""
    with zygote.group(count, BACKEND=backend) as group:
        yield Measured(group, backend, "support.model_parallel.divided:run", Found, cases)


@pytest.fixture(scope="module", params=backends(2))
def of_two(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured]:
    """What two ranks have found."""
    with measure(zygote, 2, request.param, OF_TWO) as found:
        yield found


@pytest.fixture(scope="module", params=backends(4))
def of_four(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured]:
    """What four ranks have found."""
    with measure(zygote, 4, request.param, OF_FOUR) as found:
        yield found


def reference(case: Case, logical_ranks: int = 0, backend: str = "gloo") -> Found:
    """Return what one process finds, with one thread as the ranks have."""
    return _reference(msgspec.structs.replace(case, layout="", measure=False), logical_ranks, backend)


@functools.cache
def _reference(case: Case, logical_ranks: int, backend: str) -> Found:
    with piped.alone(backend) as ranks:
        return divided.run_one(ranks, case, logical_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.grid) if name in WITH_LESS else name
        for name, case in OF_TWO.items()
        if case.model != "dropout"
    ],
)
def test_two_ranks_have_the_losses_of_one_process(of_two: Measured, name: str) -> None:
    case = OF_TWO[name]
    expected = reference(msgspec.structs.replace(case, precision="fp32"))
    of_two.compare(name, expected, 5e-3 if case.precision == "bf16" else 1e-5)
    assert case.precision == "fp32" or of_two[name][0].losses != expected.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.grid) if name in WITH_LESS else name for name in OF_FOUR]
)
def test_four_ranks_have_the_losses_of_one_process(of_four: Measured, name: str) -> None:
    of_four.compare(name, reference(OF_FOUR[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shard", "dropout", "uneven", "adam"])
def test_two_sharded_ranks_have_the_bits_of_two_parts_on_one_process(of_two: Measured, name: str) -> None:
    of_two.compare_bits(name, reference(OF_TWO[name], logical_ranks=2, backend=of_two.backend))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("gathered once", "measured"),
        ("offloaded", "adam"),
        ("recomputed", "measured"),
        ("recomputed dropout", "dropout"),
    ],
)
def test_how_parameters_are_kept_changes_no_bits(of_two: Measured, name: str, other: str) -> None:
    of_two.compare_bits(name, of_two[other][0])


@pytest.mark.slow
def test_offloaded_state_is_on_the_host(of_two: Measured) -> None:
    assert [found.devices for found in of_two["offloaded"]] == [["cpu"], ["cpu"]]


@pytest.mark.slow
def test_recomputation_keeps_fewer_bytes_for_the_backward_pass(of_two: Measured) -> None:
    for more, fewer in zip(of_two["measured"], of_two["recomputed"], strict=True):
        assert fewer.saved_bytes < more.saved_bytes / LAYERS  # what is left is the inputs of the blocks


@pytest.mark.slow
def test_sharded_ranks_have_their_parts_of_parameters_gradients_and_moments(
    of_two: Measured, of_four: Measured
) -> None:
    tensors = [each.numel() for each in Llama().parameters()]
    sizes = [each.shape[0] for each in Llama().parameters()]
    for count, ranks in ((2, of_two["adam"]), (4, of_four["shard"])):
        # The first dimension of each tensor is padded to a multiple of the ranks.
        padded = sum(n + n // rows * (-rows % count) for n, rows in zip(tensors, sizes, strict=True))
        for found in ranks:
            assert found.weights <= padded / count
            assert found.gradients == found.weights
            assert found.moments == 2 * found.weights
            assert found.num_bytes == 16 * found.weights
        assert sum(found.weights for found in ranks) == sum(tensors)
    alone = reference(Case(optimizer="adam", epochs=1))
    assert alone.num_bytes == 16 * sum(tensors)


@pytest.mark.slow
def test_tensor_ranks_have_their_parts_of_the_layers_of_the_plan(of_two: Measured) -> None:
    whole = {name: each.numel() for name, each in Llama().named_parameters()}
    cut = sum(n for name, n in whole.items() if ".attention." in name or ".ffn." in name)
    assert cut == LAYERS * (4 + 3 * 3) * WIDTH**2
    for found in of_two["tensor"]:
        assert found.weights == sum(whole.values()) - cut + cut // 2


@pytest.mark.slow
def test_tensor_ranks_reduce_twice_in_each_pass_of_a_layer(of_two: Measured) -> None:
    assert [found.forward_collectives for found in of_two["tensor"]] == 2 * [{"all_reduce": 2 * LAYERS}]
    assert [found.collectives for found in of_two["tensor"]] == 2 * [{"all_reduce": (2 + 2) * LAYERS}]


@pytest.mark.slow
def test_collectives_of_sharded_units(of_two: Measured) -> None:
    """The outermost unit is gathered once: its backward pass begins when its forward pass ends."""
    for name, gathers in (("measured", 2 * UNITS - 1), ("gathered once", UNITS)):
        for found in of_two[name]:
            assert found.forward_collectives == {"_allgather_base_": UNITS}
            assert found.collectives == {"_allgather_base_": gathers, "_reduce_scatter_base_": UNITS}


@pytest.mark.slow
def test_local_training_with_a_pull_and_a_bound_of_the_gradient(zygote: Zygote) -> None:
    layouts = ["shard=2", "tensor=2,sequence=true", "data=2,offload=cpu"]
    with zygote.group(2) as group:
        of_ranks = group.call("support.model_parallel.divided:train_all", layouts=layouts)
    with join_group("gloo") as ranks:
        expected = divided.train_with_algorithm(ranks, "", {"algorithm": "fedprox", "mu": 0.1})
    for found in of_ranks:
        for result in found:
            assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    for result in of_ranks[0]:
        assert result["total"] == pytest.approx(expected["total"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=2", "tensor=2", "pipeline=2"])
def test_no_rank_needs_the_whole_model(zygote: Zygote, tmp_path: Path, layout: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(divided.Learner(model=Llama).initial(3).to_bytes())
    with zygote.group(2) as group:
        found = group.call("support.model_parallel.divided:load_and_save", path=str(path), layout=layout)
    for rank in found:
        # A tensor is gathered at a time; no more than the largest one exists at once.
        assert rank["largest"] <= max(each.numel() for each in Llama().parameters())
        assert rank["same"]
        assert rank["error"] == found[0]["error"]
        assert "'layers.0.attention.wq.weight' has the shape no such tensor in the model and" in rank["error"]


def test_buffers_that_parts_share_keep_their_values() -> None:
    module = nn.ModuleList(nn.Linear(2, 2, device="meta") for _ in range(2))
    angles = torch.arange(3.0)
    for part in module:
        part.register_buffer("angles", angles, persistent=False)
    materialize(module, torch.device("cpu"), is_offloaded=True)
    for part in module:
        assert not part.get_parameter("weight").is_meta
        assert part.get_buffer("angles").tolist() == [0.0, 1.0, 2.0]
        assert "angles" not in part.state_dict()


def test_tensors_of_all_dtypes_reach_rank_0(zygote: Zygote) -> None:
    with zygote.group(2) as group:
        group.begin("support.model_parallel.divided:save_mixed")
        assert group.result(1) == [False, False], "only the values of rank 0 are written"
        assert group.result(0) == [True, True]


@pytest.mark.parametrize("divided_too", [False, True])
def test_optimizers_update_a_mixture_of_whole_and_divided_parameters_one_by_one(divided_too: bool) -> None:
    """On a GPU, where they update many with one kernel, that kernel refuses the mixture."""
    with piped.alone("gloo"):
        mesh = init_device_mesh("cpu", (1,))
        parameters = {"norm": nn.Parameter(torch.ones(4)), "weight": nn.Parameter(torch.ones(4, 4))}
        if divided_too:
            parameters["weight"] = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        made = torch.optim.SGD(parameters.values(), lr=0.1)
        options = LocalOptions(epochs=1, batch_size=1, learning_rate=0.1)
        Stepper(parameters, options, 0.1, StepAlgorithm(loss=make_loss(Learner(model=Llama))), lambda _: made)
        assert made.param_groups[0]["foreach"] is (False if divided_too else None)
