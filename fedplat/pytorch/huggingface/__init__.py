"""Fine-tuning with the `Trainer` of Hugging Face's transformers (extra "huggingface").

A round is one run of the Trainer from the received weights, and all rounds of a client together are one longer run: the
order of its examples, the optimizer and the learning rate's schedule continue where the client's last round ended.
"""

from __future__ import annotations

from fedplat.pytorch.huggingface.causal_lm import causal_lm
from fedplat.pytorch.huggingface.data import ArrayExamples, Collator, Dataset, MakeExample, make_causal_example
from fedplat.pytorch.huggingface.learner import HuggingFaceLearner, MakeTrainer
from fedplat.pytorch.huggingface.run import AfterStep, HuggingFaceConfig
from fedplat.pytorch.training.tokenizers import tokenizer_sha256

__all__ = [
    "AfterStep",
    "ArrayExamples",
    "Collator",
    "Dataset",
    "HuggingFaceConfig",
    "HuggingFaceLearner",
    "MakeExample",
    "MakeTrainer",
    "causal_lm",
    "make_causal_example",
    "tokenizer_sha256",
]
