"""Fine-tuning of a language model with adapters: transformers and peft alone, and clients of fedplat on that GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedplat.pytorch import convert, training
from gpu.language_model import CausalModel
from gpu.lines import Line, Measurement, Setting

NAME = "lora"
WARM_UP = 3


def measure(setting: Setting) -> Iterator[Line]:
    """Train the same batches without fedplat, and as the work of several clients in turn."""
    batch, length, steps, clients = (4, 32, 4, 2) if setting.is_small else (8, 512, 25, 4)
    module = CausalModel(setting)
    shape = batch * steps, length + 1
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, module.num_tokens, shape))
    work = f"a language model with LoRA, batches of {batch} with {length} tokens"
    rate = _plain_rate(setting, module, tokens, batch)
    alone = Measurement(
        part=NAME,
        work=work,
        system="transformers and peft",
        value=rate,
        unit="tokens/s",
        peak_bytes=setting.peak_bytes(),
    )
    yield alone
    setting.forget_peak()
    rate, sent_bytes = _federated_rate(setting, module, tokens, (batch, clients))
    system = f"fedplat, {clients} clients, {sent_bytes // clients / 1e6:,.4g} MB each"
    peak_bytes = setting.peak_bytes()
    yield Measurement(part=NAME, work=work, system=system, value=rate, unit="tokens/s", peak_bytes=peak_bytes)


def _plain_rate(setting: Setting, module: CausalModel, tokens: torch.Tensor, batch: int) -> float:
    optimizer = torch.optim.AdamW(module.trained, lr=1e-4)
    rows = tokens.split(batch)
    begin_s = 0.0
    for step in range(-WARM_UP, len(rows)):
        if step == 0:
            begin_s = setting.now_s()
        row = rows[step].to(setting.device)
        cross_entropy(module(row[:, :-1]), row[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tokens.shape[0] * (tokens.shape[1] - 1) / (setting.now_s() - begin_s)


def _federated_rate(
    setting: Setting, module: CausalModel, tokens: torch.Tensor, sizes: tuple[int, int]
) -> tuple[float, int]:
    """Return the tokens a second and the bytes of all clients' updates. One module serves all, as in an engine."""
    batch, clients = sizes
    trainee = training.Trainee(training.Learner(model=lambda: module, share="trained"), setting.device)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    examples = training.check_examples(data, setting.device)
    options = training.LocalOptions.from_config(
        {"epochs": 1, "batch_size": batch, "learning_rate": 1e-4, "optimizer": "adamw"}
    )
    version = convert.from_state_dict(trainee.shared_tensors())
    begin_s, sent_bytes = 0.0, 0
    for client in range(-1, clients):
        if client == 0:
            begin_s, sent_bytes = setting.now_s(), 0  # what came before has warmed up
        update = version.copy()
        training.train(trainee, update, training.LocalTraining(examples=examples, options=options, seed=client + 1))
        sent_bytes += len(update.to_bytes())
    return clients * tokens.shape[0] * (tokens.shape[1] - 1) / (setting.now_s() - begin_s), sent_bytes
