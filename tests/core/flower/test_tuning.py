"""An app that fine-tunes a language model as FlowerTune's do: adapters on the wire, a learning rate for each round."""

from __future__ import annotations

import importlib
import json
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")
import peft
import torch
import transformers
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from tokenizers import Tokenizer, models, pre_tokenizers

from fedplat.flower import records
from fedplat.flower.app import read_app
from fedplat.model.schema import Schema
from fedplat.simulation.flower import AppOptions, run_app
from support import flower

pytestmark = pytest.mark.slow  # the imports alone take 10 seconds
NUM_CLIENTS, NUM_ROUNDS, RANK, STEPS = 3, 3, 4, 2
RATES = 5e-3, 1e-4
PAGE = Path(__file__).resolve().parents[3] / "docs" / "language-models.md"
EXAMPLES = (5, 6, 7)
"""Of each client, which are their weights."""

CLIENT = """
import math
import tempfile

from datasets import load_dataset
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments
)

app = ClientApp()

def make_model(config):
    base = AutoModelForCausalLM.from_pretrained(config["model.name"])
    base.config.use_cache = False
    adapters = LoraConfig(r=config["model.rank"], lora_alpha=2 * config["model.rank"], lora_dropout=0.075,
                          task_type="CAUSAL_LM")
    return get_peft_model(base, adapters)

def cosine(number, total, largest, smallest):
    return smallest + 0.5 * (largest - smallest) * (1 + math.cos(math.pi * number / total))

def tune(config, arrays, number, partition):
    tokenizer = AutoTokenizer.from_pretrained(config["model.name"])
    name = f"{config['dataset.folder']}/{partition}.json"
    data = load_dataset("json", data_files=name, split="train", keep_in_memory=True)
    data = data.map(lambda row: tokenizer(f"Question: {row['instruction']} Answer: {row['response']}"),
                    remove_columns=data.column_names, keep_in_memory=True)
    model = make_model(config)
    set_peft_model_state_dict(model, arrays)
    rate = cosine(number, config["num-server-rounds"], config["train.rate-max"], config["train.rate-min"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=config["train.max-steps"], learning_rate=rate,
            lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
            logging_strategy="no", dataloader_pin_memory=False,
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
        loss = trainer.train().training_loss
    return get_peft_model_state_dict(model), loss, len(data), rate

@app.train()
def train(message, context):
    received = message.content["arrays"].to_torch_state_dict()
    number, partition = message.content["config"]["server-round"], context.node_config["partition-id"]
    arrays, loss, count, rate = tune(context.run_config, received, number, partition)
    metrics = MetricRecord({"train_loss": loss, "num-examples": count, "rate": rate})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
"""
SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from {package}.client_app import make_model

app = ServerApp()

@app.main()
def main(grid, context):
    torch.manual_seed(0)
    config = context.run_config
    strategy = FedAvg(fraction_train=config["strategy.fraction-train"], fraction_evaluate=0.0)
    arrays = ArrayRecord(get_peft_model_state_dict(make_model(config)))
    strategy.start(grid, arrays, num_rounds=config["num-server-rounds"])
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an app whose model and data are in folders, on a machine without a network."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    save_base(tmp_path / "base")
    for client, count in enumerate(EXAMPLES):
        lines = [{"instruction": f"{client} plus {n}", "response": f"{client + n}"} for n in range(count)]
        (tmp_path / f"{client}.json").write_text("\n".join(map(json.dumps, lines)))
    config = f"""
dataset.folder = "{tmp_path}"
model.name = "{tmp_path / "base"}"
model.rank = {RANK}
train.rate-max = {RATES[0]}
train.rate-min = {RATES[1]}
train.max-steps = {STEPS}
strategy.fraction-train = 1.0
num-server-rounds = {NUM_ROUNDS}"""
    written = flower.write_app(tmp_path, CLIENT, config=config)
    package = written.folder.name
    (written.folder / package / "server_app.py").write_text(SERVER.format(package=package))
    return written.folder


def save_base(folder: Path) -> None:
    """Save a tiny random Llama with a tokenizer of characters."""
    letters = {chr(code): code - 30 for code in range(32, 127)} | {"<unk>": 0, "<pad>": 1}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.LlamaConfig(
        **sizes, **special, num_attention_heads=4, num_key_value_heads=2, vocab_size=97, max_position_embeddings=64
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_it_runs_and_has_the_mean_of_its_clients_adapters(app: Path) -> None:
    rounds: list[dict[str, float]] = []
    run = run_app(
        app,
        AppOptions(num_clients=NUM_CLIENTS, workers=1),
        on_messages=lambda sent: rounds.append(sent.metrics),
    )
    assert run.result.status == "COMPLETED"
    cosine = [RATES[1] + (RATES[0] - RATES[1]) * (1 + math.cos(math.pi * n / NUM_ROUNDS)) / 2 for n in (1, 2, 3)]
    np.testing.assert_allclose([each["rate"] for each in rounds], cosine)
    assert run.model is not None
    # Queries and values of two layers: both factors, of 32 and 4, or 4 and 32 or 16.
    assert len(run.model.buffer) == 4 * 2 * (RANK * (32 + 32) + RANK * (32 + 16))
    client = importlib.import_module(f"{app.name}.client_app")
    config = read_app(app).run_config
    torch.manual_seed(0)
    module = client.make_model(config)
    expected = {name: value.numpy() for name, value in client.get_peft_model_state_dict(module).items()}
    for number in range(1, NUM_ROUNDS + 1):
        trained = [
            client.tune(config, {name: torch.tensor(each) for name, each in expected.items()}, number, node)[0]
            for node in range(NUM_CLIENTS)
        ]
        weights = np.array(EXAMPLES) / sum(EXAMPLES)
        expected = {
            name: sum(weight * each[name].numpy() for weight, each in zip(weights, trained, strict=True))
            for name in expected
        }
    assert set(run.model) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(run.model[name], values, atol=1e-6)


def test_the_bytes_of_mistral_7b_are_those_of_the_page() -> None:
    """The shapes are those of the model; the factors have no values, since sizes do not depend on them."""
    config = transformers.MistralConfig(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        base: Any = transformers.MistralForCausalLM(config)
    assert sum(each.numel() for each in base.parameters()) == 7_248_023_552
    module: Any = peft.get_peft_model(base, peft.LoraConfig(r=32, lora_alpha=64, task_type="CAUSAL_LM"))
    factors = {
        name: np.broadcast_to(np.float32(0), tuple(value.shape))
        for name, value in module.named_parameters()
        if value.requires_grad
    }
    names = {name: name.replace(".default", "") for name in factors}  # those of `get_peft_model_state_dict`
    arrays = records.share_arrays({names[name]: np.zeros(value.shape, np.float32) for name, value in factors.items()})

    def measure(name: str, record: ConfigRecord | MetricRecord) -> int:
        content = RecordDict({"arrays": arrays, name: record})
        return records.pack(records.MessageFile(content, "train")).schema.file_size_bytes

    numbers = sum(value.size for value in factors.values())
    file = Schema.of(factors).file_size_bytes
    down = measure("config", ConfigRecord({"server-round": 1, "save_path": "results/2026-11-28_02-00-00"}))
    up = measure("metrics", MetricRecord({"train_loss": 0.5, "num-examples": 1000}))
    counts = (numbers, 4 * numbers, file, down, up, 800 * file, 400 * (down + up))
    text = PAGE.read_text("utf-8")
    assert [f"{count:,}" for count in counts if f"{count:,}" not in text] == []
    assert f"{len(factors)} factors" in text
    assert 800 * max(file, down, up) < 200_000 * 10**6, "the budget of the leaderboard"
