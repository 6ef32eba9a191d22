from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.errors import MissingExtraError, ModelError
from fedplat.model import Parameters
from fedplat.pytorch import convert as backend

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


def network() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    module(torch.randn(2, 1, 4, 4))  # moves BatchNorm's counter and running statistics
    return module


def assert_equal_states(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name])


def test_a_state_dict_with_batch_norm_survives():
    source, target = network(), network()
    for tensor in target.state_dict().values():
        tensor.zero_()
    parameters = backend.from_state_dict(source.state_dict(), carry="max")
    assert parameters.schema.carry == "max"
    assert parameters["1.num_batches_tracked"] == 1
    backend.load_into(target, Parameters.from_bytes(parameters.to_bytes()))
    assert_equal_states(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS, *UNSIGNED], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_survives_by_value(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.arange(6)[: int(np.prod(shape))].reshape(shape).to(dtype)
    parameters = backend.from_state_dict({"w": tensor})
    assert parameters["w"].shape == shape
    assert parameters["w"].astype(np.float64).tolist() == tensor.double().tolist()
    back = backend.to_torch(parameters)["w"]
    assert back.dtype == dtype
    assert torch.equal(back.double(), tensor.double())


def test_tensors_share_the_buffer_both_ways():
    parameters = backend.from_state_dict({"w": torch.zeros(3), "b": torch.zeros(3, dtype=torch.bfloat16)})
    tensors = backend.to_torch(parameters)
    tensors["w"][1] = 5
    tensors["b"][2] = 2
    assert parameters["w"].tolist() == [0, 5, 0]
    assert parameters["b"].astype(float).tolist() == [0, 0, 2]
    parameters["w"][0] = 7
    assert tensors["w"].tolist() == [7, 5, 0]


def test_a_read_only_buffer_is_copied():
    parameters = Parameters.from_bytes(backend.from_state_dict({"w": torch.ones(2)}).to_bytes())
    tensors = backend.to_torch(parameters)
    tensors["w"][0] = 9  # a warning from torch about read-only memory would fail the test
    assert parameters["w"].tolist() == [1, 1]


def test_a_state_dict_is_copied():
    tensor = torch.zeros(2)
    parameters = backend.from_state_dict({"w": tensor})
    tensor.fill_(1)
    assert parameters["w"].tolist() == [0, 0]


def test_tensors_that_are_no_plain_memory():
    grid = torch.arange(6.0).reshape(2, 3)
    state = {
        "transposed": grid.t(),
        "strided": grid[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "bf16": grid.bfloat16().t(),
        "parameter": nn.Parameter(grid),
    }
    parameters = backend.from_state_dict(state)
    for name, tensor in backend.to_torch(parameters).items():
        assert torch.equal(tensor, state[name].detach())


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(3, 3, bias=False)
            self.decoder = nn.Linear(3, 3, bias=False)
            self.decoder.weight = self.encoder.weight

    source, target = Tied(), Tied()
    parameters = backend.from_state_dict(source.state_dict())
    assert set(parameters) == {"encoder.weight"}  # one entry for one tensor
    backend.load_into(target, parameters)
    assert target.decoder.weight is target.encoder.weight
    assert torch.equal(target.decoder.weight, source.encoder.weight)
    other = Parameters.from_arrays({"decoder.weight": parameters["encoder.weight"] + 1.0})
    backend.load_into(target, other)  # a file that has another of the names
    assert torch.equal(target.encoder.weight, source.encoder.weight + 1.0)
    both = Parameters.from_arrays({**parameters, **other})
    with pytest.raises(ModelError, match=r"'encoder.weight' and 'decoder.weight' of the model differ"):
        backend.load_into(target, both)
    backend.load_into(target, Parameters.from_arrays(dict.fromkeys(both, parameters["encoder.weight"])))


@pytest.mark.parametrize(
    "state",
    [nn.Linear(3, 3).state_dict(), {"weight": torch.zeros(2, 2)}, {**nn.Linear(2, 2).state_dict(), "x": torch.ones(1)}],
)
def test_load_into_refuses_another_model(state: dict[str, torch.Tensor]):
    with pytest.raises(ModelError, match="does not fit the module Linear"):
        backend.load_into(nn.Linear(2, 2), backend.from_state_dict(state))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "'w' is a str; expected a tensor"),
        (torch.zeros(2, device="meta"), "no dense values"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "no dense values"),
        (torch.eye(2).to_sparse(), "no dense values"),
        (torch.zeros(2, dtype=torch.complex64), "dtype complex64"),
    ],
)
def test_entries_without_plain_values_are_refused(value: Any, message: str):
    with pytest.raises(ModelError, match=message):
        backend.from_state_dict({"w": value})


def test_training_moves_the_model_and_the_update_says_by_how_much():
    module = nn.Linear(2, 1)
    base = backend.from_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    update = backend.from_state_dict(module.state_dict()).minus(base)
    np.testing.assert_allclose(update.to_vector(), [-0.1] * 3, rtol=1e-5)


def test_without_torch_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch):
    real_import = builtins.__import__

    def no_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "fedplat.pytorch.convert")
    monkeypatch.delattr("fedplat.pytorch.convert")
    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(MissingExtraError, match=r"pip install .*'torch>="):
        importlib.import_module("fedplat.pytorch.convert")
