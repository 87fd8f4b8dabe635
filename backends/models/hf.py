"""Any causal LM of transformers, unmodified, over our paged cache. Knows no requests.

transformers lets a model's attention be chosen by name; ours is registered under one. Each model's attention modules
carry a pointer to that model's own `StepHolder`, which holds the attention of the running step, so that models
don't share any state. As no mask is registered under the name, transformers builds none: which tokens a row sees
follows from its request alone. What a model does beyond that is found and refused by `hf_probe` when it is loaded.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from typing_extensions import override

from backends.attention.base import AttentionParams
from backends.models.base import CausalModel
from backends.models.spec import ModelLoadError

ATTENTION_NAME = "kvgate_paged"


class StepAttention(Protocol):
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor: ...


@dataclass(slots=True)
class StepHolder:
    """Attention of the step that one model is computing."""

    attention: StepAttention | None = None


def paged_attention_forward(  # the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, num_heads, rows, head_dim], key and value [1, num_kv_heads, rows, head_dim] -> [1, rows, ...]."""
    holder: Any = getattr(module, "kvgate_step", None)
    if holder is None or holder.attention is None:
        raise RuntimeError(f"{type(module).__name__} was called outside a step")
    if attention_mask is not None or kwargs.get("s_aux") is not None or not getattr(module, "is_causal", True):
        raise ModelLoadError(f"{type(module).__name__} needs more than causal attention over a window.")
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return holder.attention(layer, *rows, params).unsqueeze(0), None


class HFModel(CausalModel):
    def __init__(self, model: Any, holder: StepHolder) -> None:
        self._model = model
        self._holder = holder
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, rows: Tensor) -> Tensor:
        self._holder.attention = attention
        try:
            picked = {"logits_to_keep": rows} if self._picks_rows else {}
            output = self._model(
                input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **picked
            )
        finally:
            self._holder.attention = None
        logits: Tensor = output.logits[0]
        return logits if self._picks_rows else logits[rows]

    def own_logits(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, vocab_size] of one sequence from its start, with the model's own attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        return logits
