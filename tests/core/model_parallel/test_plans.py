"""Plans and layouts that cannot work, refused with a name; and Hugging Face's spelling of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from torch import nn

from fedplat.aggregate.local import LocalAlgorithm
from fedplat.local_options import LocalOptions
from fedplat.parallel import Parallel
from fedplat.pytorch.parallel import ParallelPlan
from fedplat.pytorch.parallel.algorithms import refuse_algorithm
from fedplat.pytorch.parallel.apply import check_plan
from fedplat.pytorch.parallel.plan import Style, find_plan, list_blocks
from support.model_parallel.divided import Tied
from support.model_parallel.llama import PLAN, Llama


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shard", "'shard': expected NAME=VALUE"),
        ("", "'': expected NAME=VALUE"),
        ("shard=", "'shard=': expected NAME=VALUE"),
        ("shard=2,shard=4", "'shard=4': expected NAME=VALUE, each name once"),
        ("shards=2", "unknown field `shards`"),
        ("shard=0", "`int` >= 1"),
        ("shard=-2", "Expected `int`, got `str`"),
        ("shard=two", "Expected `int`, got `str`"),
        ("tensor=2,sequence=yes", "Expected `bool`, got `str`"),
        ("pipeline=2,schedule=fast", "Invalid enum value 'fast'"),
        ("shard=2,offload=disk", "Invalid enum value 'disk'"),
        ("sequence=true", "sequence = true divides activations among tensor ranks; expected tensor = 2 or more"),
        ("micro_batches=4", "micro_batches are for a pipeline"),
        ("pipeline=4,micro_batches=2", 'schedule = "1f1b" needs at least one for each of 4 stages; expected more'),
        (
            "pipeline=2,schedule=interleaved-1f1b,micro_batches=5",
            "computes them in 2 equal rounds; expected a multiple",
        ),
        ("pipeline=2,tensor=2,schedule=zero-bubble", "an order that tensor ranks do not share"),
        ("pipeline=2,shard=2,schedule=pipedream", "for a pipeline alone"),
        ("pipeline=2,schedule=pipedream,offload=cpu", "remove offload and recompute"),
    ],
)
def test_mistakes_in_a_layout(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + "".join(f"[{c}]" if c in "[]()*+?.|" else c for c in message)):
        Parallel.from_text(text)


def test_layouts_as_text() -> None:
    assert Parallel.from_text("shard=2, tensor = 2,sequence=true") == Parallel(shard=2, tensor=2, sequence=True)
    assert Parallel.from_text("shard=2,reshard=false,offload=cpu") == Parallel(shard=2, reshard=False, offload="cpu")


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b", "zero-bubble"])
@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_only_1f1b_needs_a_micro_batch_for_each_rank(schedule: str, count: int) -> None:
    layout = Parallel.from_text(f"pipeline=4,schedule={schedule},micro_batches={count}")
    assert layout.num_micro_batches == count


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_precision_with_scaled_gradients_is_refused(schedule: str) -> None:
    layout = Parallel.from_text(f"pipeline=2,schedule={schedule}")
    with pytest.raises(
        ValueError, match=r'precision = "fp16": a model that several ranks divide .*; expected "bf16" or'
    ):
        layout.check_steps(max_grad_norm=0.0, accumulate=1, precision="fp16")
    Parallel(shard=2).check_steps(max_grad_norm=1.0, accumulate=2, precision="bf16")


def test_other_numbers_of_ranks() -> None:
    with pytest.raises(ValueError, match="1 data × 2 shard × 2 tensor × 1 pipeline = 4 ranks; there are 3"):
        Parallel(shard=2, tensor=2).check_ranks(3)


def test_a_pattern_without_a_match() -> None:
    with pytest.raises(ValueError, match=r"'layers.\*.wq' matches no part of Llama; its parts are embedding, layers"):
        find_plan(Llama(), ParallelPlan(tensor={"layers.*.wq": "colwise"}))


@pytest.mark.parametrize(
    ("tensor", "size", "message"),
    [
        ({}, 2, "the plan of Llama has no tensor styles"),
        (
            {"layers.*.attention.wq": "columns"},
            2,
            "layers.0.attention.wq has the style 'columns' in the plan; expected",
        ),
        ({"layers.*.attention": "colwise"}, 2, "layers.0.attention is a Attention, which 'colwise' cannot divide"),
        ({"output": "embedding_rowwise"}, 2, "output is a Linear, which 'embedding_rowwise' cannot divide"),
        ({"layers.*.attention.wq": "colwise"}, 3, "layers.0.attention.wq has 32 outputs; 3 tensor ranks need"),
        ({"layers.*.ffn.down": "rowwise"}, 5, "layers.0.ffn.down has 96 inputs; 5 tensor ranks need"),
    ],
)
def test_layers_that_cannot_be_divided(tensor: dict[str, Any], size: int, message: str) -> None:
    module = Llama()
    with pytest.raises(ValueError, match=message):
        check_plan(module, find_plan(module, ParallelPlan(tensor=tensor)), Parallel(tensor=size))


class NormalizedQueries(Llama):
    """A model that normalises the queries of each head."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.get_submodule("attention").register_module("query_norm", nn.RMSNorm(8))


def test_parameters_between_columns_and_rows_need_a_style() -> None:
    module = NormalizedQueries()
    with pytest.raises(ValueError, match=r"layers.0.attention.query_norm has the trained parameter 'weight' and no st"):
        check_plan(module, PLAN, Parallel(tensor=2))
    named: dict[str, Style] = {**PLAN.tensor, "layers.*.attention.query_norm": "replicated_with_grad_allreduce"}
    check_plan(module, ParallelPlan(tensor=named), Parallel(tensor=2))
    for layer in module.layers:
        layer.get_submodule("attention.query_norm").requires_grad_(False)
    check_plan(module, PLAN, Parallel(tensor=2))


def test_gradients_that_each_rank_has_are_not_added_up() -> None:
    def check(sequence: bool, style: Style, *names: str) -> None:
        tensor: dict[str, Style] = {**PLAN.tensor, **dict[str, Style].fromkeys(names, style)}
        plan = ParallelPlan(tensor=tensor, blocks=("layers.*",))
        check_plan(Llama(), plan, Parallel(tensor=2, sequence=sequence))

    style: Style = "replicated_with_grad_allreduce"
    for sequence in (False, True):
        with pytest.raises(ValueError, match=r"^norm has the style .* but is not between the columns"):
            check(sequence, style, "norm")
        check(sequence, "sequence_parallel", "norm")
    with pytest.raises(ValueError, match=r"^layers.0.ffn_norm has the style .*; expected .sequence_parallel., or no"):
        check(False, style, "layers.*.ffn_norm")
    check(True, style, "layers.*.ffn_norm")  # each rank has a part of the sequence there
    layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    tensor: dict[str, Style] = {"1": "colwise", "2": style, "3": "rowwise"}
    check_plan(layers, ParallelPlan(tensor=tensor), Parallel(tensor=2))
    for outside in ("0", "4"):
        with pytest.raises(ValueError, match=f"^{outside} has the style"):
            check_plan(layers, ParallelPlan(tensor={**tensor, outside: style}), Parallel(tensor=2))
    layers[0].requires_grad_(False)
    check_plan(layers, ParallelPlan(tensor={**tensor, "0": style}), Parallel(tensor=2))


def test_a_list_needs_a_style_only_for_layers_between_columns_and_rows() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"1 has the trained parameter 'weight' and no style"):
        check_plan(layers, ParallelPlan(tensor={"0": "colwise", "2": "rowwise"}), Parallel(tensor=2))
    check_plan(layers, ParallelPlan(tensor={"2": "colwise", "3": "rowwise"}), Parallel(tensor=2))


def test_divided_outputs_are_added_up() -> None:
    with pytest.raises(ValueError, match=r"output has the style 'colwise' .* no layer after it is 'rowwise'"):
        check_plan(Llama(), ParallelPlan(tensor={**PLAN.tensor, "output": "colwise"}), Parallel(tensor=2))


def test_sequences_need_a_style_for_each_layer_of_a_block() -> None:
    tensor: Mapping[str, Style] = {name: style for name, style in PLAN.tensor.items() if "ffn_norm" not in name}
    parallel = Parallel(tensor=2, sequence=True)
    with pytest.raises(ValueError, match=r"layers.\d.ffn_norm is a RMSNorm without a style"):
        check_plan(Llama(), ParallelPlan(tensor=tensor, blocks=("layers.*",)), parallel)
    with pytest.raises(ValueError, match=r"layers.\d.ffn_norm is a RMSNorm without a style"):
        check_plan(Llama(), ParallelPlan(tensor=tensor), parallel)


def test_the_members_of_lists_are_blocks_unless_the_plan_names_some() -> None:
    module = nn.ModuleDict(
        {"convolutions": nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))}
    )
    module["encoder"] = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    module["head"] = nn.Linear(2, 2)
    assert list_blocks(module, ParallelPlan()) == [
        "convolutions.0",
        "convolutions.2",
        "encoder.layers.0",
        "encoder.layers.1",
    ]
    module["head"].weight = module.get_submodule("encoder.layers.0").weight  # which cannot be sharded alone
    assert list_blocks(module, ParallelPlan()) == ["convolutions.0", "convolutions.2", "encoder.layers.1"]
    assert list_blocks(module, ParallelPlan(blocks=("head",))) == ["head"]
    assert list_blocks(Llama(), ParallelPlan()) == list_blocks(Llama(), ParallelPlan(blocks=("layers.*",)))


def test_blocks_do_not_share_parameters_with_other_parts() -> None:
    check_plan(Tied(), ParallelPlan(blocks=("layers.*",)), Parallel(shard=2))
    with pytest.raises(ValueError, match=r"embedding.weight and output.weight are the same parameter"):
        check_plan(Tied(), ParallelPlan(blocks=("output",)), Parallel(shard=2))


class HuggingFaceModel(nn.Module):
    """A model with the attributes of those of `transformers`, around a base model."""

    base_model_prefix = "model"
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()
        self.lm_head = nn.Linear(8, 8)
        self._tp_plan = {f"model.{name}": style for name, style in PLAN.tensor.items()} | {
            "lm_head": "colwise_rep",
            "model.layers.*.experts": "moe_tp_experts",  # of a variant
        }
        self._pp_plan: Any = {"lm_head": None, "model.embedding": None, "model.layers": None, "model.norm": None}


def test_the_plan_of_a_model_of_transformers() -> None:
    module = HuggingFaceModel()
    plan = find_plan(module, None)
    assert plan.stages == ("model.embedding", "model.layers.*", "model.norm", "lm_head")
    assert list_blocks(module, plan) == [f"model.layers.{number}" for number in range(4)]
    assert plan.tensor == {**{f"model.{name}": style for name, style in PLAN.tensor.items()}, "lm_head": "colwise_rep"}
    check_plan(module, plan, Parallel(shard=2, tensor=2))


def test_the_plan_of_the_configuration_of_a_model_of_transformers() -> None:
    module = HuggingFaceModel()
    module._tp_plan = {}  # pyright: ignore[reportPrivateUsage]
    config = type("Config", (), {"base_model_tp_plan": dict(PLAN.tensor)})()
    cast(Any, module).config = config
    assert find_plan(module, None).tensor == {f"model.{name}": style for name, style in PLAN.tensor.items()}


def options(algorithm: str) -> LocalOptions:
    extra = {"alpha": 0.1} if algorithm == "feddyn" else {}
    return LocalOptions.from_config(
        {"epochs": 1, "batch_size": 4, "learning_rate": 0.1, "algorithm": algorithm} | extra
    )


@pytest.mark.parametrize(("name", "reason"), [("scaffold", "has control variates"), ("feddyn", "has client state")])
def test_algorithms_that_need_whole_tensors(name: str, reason: str) -> None:
    table = options(name)
    with pytest.raises(ValueError, match=f'algorithm = "{name}": it {reason}.*not possible with a model that several'):
        refuse_algorithm(table, table.build_algorithm())


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (LocalAlgorithm(make_loss=lambda context: cast(Any, None)), "has its own loss"),
        (LocalAlgorithm(perturb=lambda gradients: gradients), "uses gradients at other weights"),
    ],
)
def test_plugins_that_need_whole_tensors(algorithm: LocalAlgorithm, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        refuse_algorithm(options("sgd"), algorithm)


@pytest.mark.parametrize("name", ["sgd", "fedprox"])
def test_algorithms_that_work_in_a_layout(name: str) -> None:
    refuse_algorithm(options(name), options(name).build_algorithm())
