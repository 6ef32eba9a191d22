"""Print the perplexity before and after training, and the continuation of a text: python generate.py FILE [TEXT]."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from fedplat import Parameters
from fedplat.pytorch.convert import to_torch

import data
import model


def load(parameters: Parameters) -> Any:
    """Return the model with the adapters of a job."""
    module = model.make_model().eval()
    module.load_state_dict(to_torch(parameters), strict=False)
    return module


def perplexity(module: Any) -> float:
    """Return the perplexity of test data that no client has: exp of the mean loss of a token."""
    tokens, following = map(torch.from_numpy, data.load(data.NUM_CLIENTS))
    with torch.no_grad():
        logits = torch.cat([module(batch).logits for batch in tokens.split(8)])
    return math.exp(torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), following))


def main() -> None:
    """Print what the training has changed."""
    parser = argparse.ArgumentParser(description="Print what the training has changed.")
    parser.add_argument("file", type=Path, help="a model: of a run folder, or exported")
    parser.add_argument("text", nargs="?", default="ROMEO:\n", help="the beginning of the text to print")
    arguments = parser.parse_args()
    trained, tokenizer = load(Parameters.open(arguments.file)), model.make_tokenizer()
    print(f"perplexity: {perplexity(load(model.initial())):.1f} before, {perplexity(trained):.1f} after")
    torch.manual_seed(0)
    tokens = tokenizer(arguments.text, add_special_tokens=False, return_tensors="pt")
    print(tokenizer.decode(trained.generate(**tokens, max_new_tokens=150, do_sample=True, temperature=0.7)[0]))


if __name__ == "__main__":
    main()
