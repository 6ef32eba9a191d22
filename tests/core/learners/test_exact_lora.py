"""Rules that aggregate the products of adapters: exact, whatever a layer's layout, the order, the type of the base."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
import torch
from peft import LoraConfig, get_peft_model

from fedplat.aggregate import Accumulator, Contribution, FedAvg, FedExLora, Flora, RuleOptions, Shard
from fedplat.aggregate.factors import factor_names, name_pairs
from fedplat.client_state import ClientState
from fedplat.errors import JobFileError, ModelError
from fedplat.model import SERVER, Parameters
from fedplat.pytorch.huggingface import HuggingFaceConfig, HuggingFaceLearner
from fedplat_client import Task
from fedplat_client.trainers.huggingface import HuggingFaceTrainer
from support import language

pytestmark = pytest.mark.slow  # the imports alone take 10 seconds
Wide = npt.NDArray[np.float64]
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
SCALING = 2.0
ARGUMENTS = {"learning_rate": 3e-2, "per_device_train_batch_size": 4}


def make_gpt2() -> Any:
    return language.with_adapters(language.make_gpt2(), ("c_attn", "attn.c_proj"))


def make_coarse() -> Any:
    """A base in bfloat16; peft keeps the adapters in float32."""
    return language.with_adapters(language.make_llama().to(torch.bfloat16))


def make_silos(*make: Callable[[], Any]) -> list[HuggingFaceTrainer]:
    return [
        HuggingFaceTrainer(model=each, data=language.Text(24, seed=number), arguments=ARGUMENTS, seed=number)
        for number, each in enumerate(make)
    ]


@functools.cache
def base_of(make: Callable[[], Any]) -> str:
    return HuggingFaceLearner(model=make).base_sha256()


def train(silos: Sequence[HuggingFaceTrainer], model: Parameters, number: int, **config: Any) -> list[Parameters]:
    trained: list[Parameters] = []
    for silo in silos:
        given = {"max_steps": 8, **config, "base_sha256": base_of(silo.model)}
        result = silo(Task(name="chat", parameters=model.copy(), config=given, round=number)).parameters
        assert isinstance(result, Parameters)
        trained.append(result)
    return trained


def aggregate(
    options: RuleOptions, base: Parameters, trained: Sequence[Parameters], order: Sequence[int]
) -> Parameters:
    rule = options.build()
    accumulator = Accumulator(base.schema, rule)
    for index in order:
        accumulator.fold(trained[index].minus(base), Contribution(1000 * WEIGHTS[index]))
    return accumulator.finish(base, rule.init(base.schema.num_floating))[0]


def aggregate_apart(options: RuleOptions, base: Parameters, trained: Sequence[Parameters]) -> Parameters:
    """As two gateways or ranks do, whose sums are added."""
    rule = options.build()
    parts = [Accumulator(base.schema, rule) for _ in range(2)]
    for index, each in enumerate(trained):
        parts[index % 2].fold(each.minus(base), Contribution(1000 * WEIGHTS[index]))
    total = parts[0].total + parts[1].total
    shard = Shard(range(total.size), memory=total)
    merged = Accumulator.merge_partials(base.schema, rule, {}, [part.summary for part in parts], shard)
    return merged.finish(base, rule.init(base.schema.num_floating))[0]


def products(model: Parameters) -> dict[str, Wide]:
    """What each adapter adds to its weight, [outputs, inputs], without s."""
    found: dict[str, Wide] = {}
    for a, b, product in name_pairs(model.schema):
        found[product] = model[b].astype(np.float64) @ model[a].astype(np.float64)
        if product in model:
            found[product] += model[product]
    return found


def error(start: Parameters, trained: Sequence[Parameters], result: dict[str, Wide]) -> float:
    """The largest error of the change of a layer, relative to the change that is the mean of the clients'."""
    errors: list[float] = []
    for name, before in products(start).items():
        ideal = sum(weight * products(each)[name] for weight, each in zip(WEIGHTS, trained, strict=True)) - before
        errors.append(float(np.linalg.norm(result[name] - before - ideal) / np.linalg.norm(ideal)))
    return max(errors)


def probe(silo: HuggingFaceTrainer, model: Parameters) -> dict[str, Wide]:
    """The weights [outputs, inputs] of the adapted layers as the module computes with them."""
    found: dict[str, Wide] = {}
    with HuggingFaceLearner(model=silo.model, device="cpu").borrow(HuggingFaceConfig(), is_required=False) as trainee:
        trainee.load(model, ClientState())
        for a, _, product in name_pairs(model.schema):
            layer: Any = trainee.module.get_submodule(a.partition(".lora_A")[0])
            with torch.no_grad():
                identity = torch.eye(layer.in_features)
                found[product] = (layer(identity) - layer(torch.zeros_like(identity))).T.double().numpy()
    return found


@pytest.mark.parametrize("make", [language.make_adapted, make_gpt2])
def test_fedex_is_exact_and_the_layers_use_it(make: Callable[[], Any]) -> None:
    silos = make_silos(*[make] * 4)
    options = FedExLora(scaling=SCALING)
    model = options.build().requirements.extend(HuggingFaceLearner(model=make).initial())
    for number in (1, 2, 3):
        trained = train(silos, model, number)
        following = aggregate(options, model, trained, range(4))
        assert error(model, trained, products(following)) <= 1e-6
        averaged = aggregate(FedAvg(), model.uploaded, [each.uploaded for each in trained], range(4))
        factors_only = {name: value + model.get(name, 0.0) for name, value in products(averaged).items()}
        assert error(model, trained, factors_only) >= 0.05
        square = [name for name in products(model) if len(set(following[name].shape)) == 1]
        assert square
        step = {name: following[name] - model[name] for name in square}
        mutant = products(following) | {name: products(following)[name] - step[name] + step[name].T for name in square}
        assert error(model, trained, mutant) >= 0.1
        for other in (aggregate(options, model, trained, (3, 1, 0, 2)), aggregate_apart(options, model, trained)):
            for name, value in products(following).items():
                assert np.linalg.norm(products(other)[name] - value) <= 1e-6 * np.linalg.norm(value)
        for each in step.values():
            values = np.linalg.svd(each, compute_uv=False)
            assert (values > 1e-5 * values[0]).sum() == 12  # (K - 1) r
        # The layers compute with the mean of the clients' weights: the term has the layer's orientation.
        before, after = probe(silos[0], model), probe(silos[0], following)
        for name in before:
            ideal = sum(weight * products(each)[name] for weight, each in zip(WEIGHTS, trained, strict=True))
            change = SCALING * (ideal - products(model)[name])
            assert np.linalg.norm(after[name] - before[name] - change) <= 1e-5 * np.linalg.norm(change)
        model = following


def test_a_base_of_bfloat16_keeps_the_term_apart() -> None:
    silos = make_silos(*[make_coarse] * 4)
    options = FedExLora(scaling=SCALING)
    start = model = options.build().requirements.extend(HuggingFaceLearner(model=make_coarse).initial())
    for number in (1, 2, 3):
        trained = train(silos, model, number)
        following = aggregate(options, model, trained, range(4))
        assert error(model, trained, products(following)) <= 1e-6
        model = following
    module = make_coarse()
    for name, change in products(model).items():
        weight = module.get_submodule(name.removeprefix(SERVER).partition(".lora_BA")[0]).base_layer.weight
        merged = (weight.double() + SCALING * torch.from_numpy(change)).to(torch.bfloat16) - weight.double()
        ideal = torch.from_numpy(SCALING * change)
        assert torch.linalg.norm(merged.double() - ideal) <= 0.05 * torch.linalg.norm(ideal)
    assert products(start).keys() == products(model).keys()


def test_flora_adds_adapters_of_all_ranks_as_peft_stacks_them() -> None:
    def make(rank: int) -> Any:
        torch.manual_seed(rank)
        return language.with_adapters(language.make_llama(), rank=rank, scaling=SCALING)

    ranks = (1, 2, 4, 8)
    silos = make_silos(*(functools.partial(make, rank) for rank in ranks))
    options = Flora(scaling=SCALING)
    start = model = options.build().requirements.extend(HuggingFaceLearner(model=silos[3].model).initial())
    for number in (1, 2):
        trained = train(silos, model, number)
        following = aggregate(options, model, trained, range(4))
        stacked = stack(ranks, start, trained)
        for name, change in stacked.items():
            step = SCALING * (following[name].astype(np.float64) - model[name])
            assert np.linalg.norm(step - change) <= 1e-6 * np.linalg.norm(change)
            a, b = factor_names(name)
            np.testing.assert_array_equal(following[a], start[a])
            assert not following[b].any()
            mean = {each: np.average([t[each] for t in trained], axis=0, weights=WEIGHTS) for each in (a, b)}
            assert np.linalg.norm(SCALING * mean[b] @ mean[a] - change) >= 0.1 * np.linalg.norm(change)
        model = following
    changed = model.copy()
    for name in changed:
        if "lora_B" in name:
            changed[name] += 1.0
    with pytest.raises(ModelError, match=r'has the rank 8 in .* model, all of it in use.*rule "flora"'):
        train(silos[:1], changed, 3)
    rounded = make_silos(lambda: language.with_adapters(language.make_llama(), rank=8, scaling=1.5))
    with pytest.raises(ModelError, match=r"has the scaling 1.5, and the job states 2 \(aggregation.scaling\)"):
        train(rounded, model, 3)


def stack(ranks: Sequence[int], start: Parameters, trained: Sequence[Parameters]) -> dict[str, Wide]:
    """Return the weighted sum of products by peft's own stacking of adapters, [outputs, inputs], with s."""
    names = [f"silo{index}" for index in range(len(ranks))]
    model: Any = None
    for name, rank in zip(names, ranks, strict=True):
        config = LoraConfig(r=rank, lora_alpha=int(SCALING * rank), target_modules=["q_proj", "v_proj"])
        if model is None:
            model = get_peft_model(language.make_llama(), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    values = {
        each.replace(".default.", f".{name}."): torch.from_numpy(
            parameters[each][:rank] if "lora_A" in each else parameters[each][:, :rank].copy()
        )
        for name, rank, parameters in zip(names, ranks, trained, strict=True)
        for each in parameters
        if not each.startswith(SERVER)
    }
    found = model.load_state_dict(values, strict=False)
    assert not found.unexpected_keys
    model.add_weighted_adapter(names, list(WEIGHTS), "cat", combination_type="cat")
    return {
        product: model.get_submodule(a.partition(".lora_A")[0]).get_delta_weight("cat").double().numpy()
        for a, _, product in name_pairs(start.schema)
    }


def test_factors_that_take_turns_are_exact() -> None:
    """RoLoRA: Chen et al. 2025, arXiv 2502.01755: B is trained in odd rounds, and A in even ones."""
    silos = make_silos(*[language.make_adapted] * 4)
    model = HuggingFaceLearner(model=language.make_adapted).initial()
    for number in (1, 2, 3):
        trained = train(silos, model, number, alternate="*lora_B*, *lora_A*")
        for each, name in itertools.product(trained, model):
            rests = ("lora_A" in name) == (number % 2 == 1)
            assert np.array_equal(each[name], model[name]) == rests
        following = aggregate(FedAvg(), model, trained, range(4))
        assert error(model, trained, products(following)) <= 1e-6
        model = following
    for config, kind, message in (
        ({"alternate": "*head*, *lora_A*"}, ModelError, r"'\*head\*' matches none of the trained tensors: base_model"),
        ({"alternate": "*lora_A*", "keep_optimizer": True}, JobFileError, "would lose its optimizer's state"),
    ):
        with pytest.raises(kind, match=message):
            train(silos[:1], model, 1, **config)
    options = HuggingFaceConfig(base_sha256=base_of(language.make_adapted))
    with silos[0]._learner.borrow(options) as trainee:  # pyright: ignore[reportPrivateUsage]
        assert set(trainee.parameters()) == set(model)  # also after a failure


def test_only_b_is_sent_where_a_belongs_to_the_base() -> None:
    """FFA-LoRA: its updates have 3 / 4 of the numbers of c_attn's adapters, whose outputs are thrice the inputs."""

    def make() -> Any:
        model = language.with_adapters(language.make_gpt2(), ("c_attn",))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name)
        return model

    silos = make_silos(*[make] * 4)
    model = HuggingFaceLearner(model=make).initial()
    whole = HuggingFaceLearner(model=lambda: language.with_adapters(language.make_gpt2(), ("c_attn",))).initial()
    assert 4 * len(model.buffer) == 3 * len(whole.buffer)
    factors = {name: array.copy() for name, array in whole.items() if "lora_A" in name}
    for number in (1, 2, 3):
        trained = train(silos, model, number)
        following = aggregate(FedAvg(), model, trained, range(4))
        complete = [Parameters.from_arrays({**each, **factors}) for each in (model, following, *trained)]
        assert error(complete[0], complete[2:], products(complete[1])) <= 1e-6
        model = following
