"""How long a context is served, and how a model's rotary embedding is stretched for more than its own. No torch.

Beyond its own context a model with rotary positions is served by YaRN with a factor that follows from the configured
length alone. It doesn't change with the length of a text, so a prompt has the same KV whatever came before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from backends.models.spec import ModelLoadError

Config = dict[str, Any]
EXTENDABLE = ("default", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN with its own defaults but for what the model's config says itself."""

    factor: float
    original_len: int

    def parameters(self, own: Config) -> Config:
        """`own`: the rotary parameters of the model's config."""
        return {name: value for name, value in own.items() if name != "type"} | {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_len,
        }

    @override
    def __str__(self) -> str:
        return f"yarn, factor {self.factor:g}"


@dataclass(frozen=True, slots=True)
class ContextPlan:
    length: int  # 0 = nobody says
    native_len: int  # the model's own; 0 = its config doesn't say
    scaling: RopeScaling | None = None
    notices: tuple[str, ...] = ()

    def applied(self, config: Config) -> Config:
        """The model's config, its rotary embedding stretched. Only for one whose text config is the whole."""
        if self.scaling is None:
            return config
        theta = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
        return config | {"rope_scaling": self.scaling.parameters(theta | rope_parameters(config))}


def plan_context(config: Config, asked: int | None) -> ContextPlan:
    """What is asked for; the model's own if nothing is. Raises `ModelLoadError` for more than it can be stretched to.

    Models that transformers computes are looked at again when they are loaded: a config says too little.
    """
    text = config.get("text_config") or config
    own = _own_len(text)
    if own is None:
        return ContextPlan(asked or 0, 0)
    if asked is None or asked <= own:
        return ContextPlan(asked or own, own)
    return _extended(text, own, asked)


def _own_len(text: Config) -> int | None:
    own: int | None = text.get("max_position_embeddings") or text.get("n_positions")
    rope = rope_parameters(text)
    if rope_type(rope) == "longrope":
        # beyond it the frequencies change with the longest sequence of a batch, so answers would depend on others
        return rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings") or own
    return own


def _extended(text: Config, own: int, asked: int) -> ContextPlan:
    rope = rope_parameters(text)
    if reason := _obstacle(text, rope):
        raise ModelLoadError(
            f"max_model_len {asked} is beyond the model's context of {own} tokens, and that can't be extended: "
            f"{reason}. Set max_model_len to {own} or less."
        )
    original = rope.get("original_max_position_embeddings") or own
    factor = asked / original
    if factor <= (rope.get("factor") or 1):  # the model's own scaling reaches as far
        return ContextPlan(asked, own)
    scaling = RopeScaling(factor, original)
    notice = (
        f"max_model_len {asked} is beyond the model's own context of {own} tokens. It is reached by RoPE scaling "
        f"({scaling}), for which the model was not trained: answers get somewhat worse, those to short prompts too."
    )
    return ContextPlan(asked, own, scaling, (notice,))


def _obstacle(text: Config, rope: Config) -> str | None:
    name = text.get("model_type", "this kind of")
    if any(isinstance(value, dict) for value in rope.values()):
        return f"layers of {name} models differ in their rotary embedding"
    if rope_type(rope) not in EXTENDABLE:
        return f"its rotary embedding is scaled already ({rope_type(rope)})"
    if has_sliding_window(text):
        return "some of its layers see no more than a sliding window"
    if text.get("n_positions") or str(text.get("position_embedding_type", "rope")) not in ("rope", "rotary"):
        return f"{name} models have no rotary embedding, but learned positions"
    return None


def has_sliding_window(text: Config) -> bool:
    """Where a config leaves it out, only Mistral's class has one."""
    kinds = text.get("layer_types")
    if kinds is not None:
        return any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
    default_window = 4096 if text.get("model_type") == "mistral" else None
    window = text.get("sliding_window", default_window)
    uses = text.get("use_sliding_window", text.get("model_type") not in ("qwen2", "qwen3"))
    return bool(window and uses) or bool(text.get("attention_chunk_size"))


def rope_parameters(config: Config) -> Config:
    """Old configs say `rope_scaling`, new ones `rope_parameters`."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_type(rope: Config) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))
