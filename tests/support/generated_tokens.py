"""What transformers generates from a model's folder, greedily and one prompt at a time: the answer to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


def generate(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Always `num_tokens` each: no end mark ends an answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers
