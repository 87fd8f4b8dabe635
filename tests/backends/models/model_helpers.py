"""Tiny random models in folders, what transformers generates with them, and a hand-made schedule to run them with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from backends.core.block_pool import KVCacheBlock
from backends.core.request import Request
from backends.core.scheduler_types import ScheduledRequest
from backends.models.base import LoadedModel
from backends.models.native_step import make_native_step
from backends.protocol.messages import CacheParams, SamplingParams
from backends.worker.kv_cache import PagedKVCache
from backends.worker.model_runner import ModelRunner

torch.set_num_threads(1)

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide, so that logits are well apart and outputs don't repeat one token
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 10_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
SLIDING = {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
# tied, a random Gemma repeats its last token for ever
GEMMA = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "tie_word_embeddings": False}

# name -> (family, what its config says beside SIZES)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, **SLIDING}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 9, "head_dim": 8}),
}
THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gpt2": ("GPT2", {}),
    "llama-dynamic-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
}


def make_folder(folder: Path, family: str, extra: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model of the family, the same for the same arguments."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**(SIZES | extra))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # else biases are 0 and norms 1, and not tested
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder)
    return folder


def make_prompts(*lengths: int) -> list[list[int]]:
    randomness = random.Random(3)
    return [[randomness.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def make_request(prompt: Sequence[int], sampling: SamplingParams, name: str = "r", seed: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        max_tokens=10_000,
        eos_token_ids=frozenset(),
        sampling=sampling,
        cache=CacheParams(),
        seed=seed,
        arrived_at=0.0,
    )


class Driver:
    """Runs requests by a given chunk size, over blocks in no order and a cache full of NaN."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        in_order: bool = False,
        compiled: bool = False,
        kv_dtype: str = "auto",
    ) -> None:
        self.cache = PagedKVCache.allocate(loaded.spec, num_blocks, block_size, kv_dtype)
        self.cache.tensor.view(torch.uint8).fill_(255)  # NaN in every float type, and as the scale of an int8 row
        step = make_native_step(loaded, self.cache.tensor) if compiled else None
        self.runner = ModelRunner(loaded, self.cache, decode_step=step)
        self.free = list(range(num_blocks))
        if not in_order:
            random.Random(5).shuffle(self.free)

    def schedule(self, request: Request, num_tokens: int) -> ScheduledRequest:
        stop = request.num_computed_tokens + num_tokens
        while len(request.blocks) * self.cache.block_size < stop:
            request.blocks.append(KVCacheBlock(self.free.pop(0)))
        return ScheduledRequest(request, request.num_computed_tokens, num_tokens)

    def step(self, scheduled: Sequence[ScheduledRequest]) -> None:
        sampled = self.runner.execute(scheduled)
        for item, token_id in zip(scheduled, sampled, strict=True):
            assert item.samples == (token_id is not None)
            item.request.num_computed_tokens += item.num_tokens
            if token_id is not None:
                item.request.output_token_ids.append(token_id)

    def release(self, request: Request) -> None:
        self.free = [block.block_id for block in request.blocks] + self.free
        request.blocks = []

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        chunk: int,
        sampling: SamplingParams | None = None,
        starts: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """All requests together; request i joins at step starts[i]."""
        greedy = SamplingParams(temperature=0)
        requests = [make_request(prompt, sampling or greedy, f"r{i}", seed=i) for i, prompt in enumerate(prompts)]
        joins = list(starts or [0] * len(requests))
        step = 0
        while any(len(request.output_token_ids) < num_tokens for request in requests):
            ready = [
                request
                for request, join in zip(requests, joins, strict=True)
                if join <= step and len(request.output_token_ids) < num_tokens
            ]
            if ready:
                self.step([self.schedule(request, min(chunk, request.num_pending_tokens)) for request in ready])
            step += 1
        for request in requests:
            self.release(request)
        return [request.output_token_ids for request in requests]
