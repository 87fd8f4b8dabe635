"""A test double of an engine, without torch: repeats the prompt's words. It ships only because processes load it.

Chosen by the model name "scripted" or "scripted:tokens=50,delay=0.002". Options:
    tokens       words of an answer before it stops by itself (16)
    delay        seconds that a step takes (0)
    start_delay  seconds until the instance is ready (0)
    start_error  start fails with this text (spaces written as _)
    start_kv     start_delay and start_error hold only for an instance of this KV dtype
    bug          a step raises once a running prompt has this word, as a broken engine would
    context      max_model_len (8192)

Word i of the answer is word `i % n` of the prompt's n words. Blocks are really counted: allocated as an answer grows,
refused when they can never suffice, waited for when they are taken, given back at the end of a request.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from backends.config import EngineConfig
from backends.core.errors import RequestRefused
from backends.core.request import AnswerText, Request, TokenGrammar
from backends.engines.admission import accepted
from backends.engines.base import Emit
from backends.protocol.messages import (
    ChatPrompt,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    FinishReason,
    GrammarSpec,
    Prompt,
    TextPrompt,
    Timings,
    TokenChunk,
    TokenPrompt,
    Usage,
)

DEFAULT_NUM_BLOCKS = 1024
VOCAB_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Script:
    """The options of the module's docstring."""

    tokens: int = 16
    delay: float = 0.0
    start_delay: float = 0.0
    start_error: str = ""
    start_kv: str = ""
    bug: str = ""
    context: int = 8192

    @classmethod
    def parse(cls, model: str) -> Script:
        options = dict(item.split("=", 1) for item in model.partition(":")[2].split(",") if item)
        parse: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
        types = {option.name: str(option.type) for option in fields(cls)}
        return cls(**{name: parse[types[name]](value) for name, value in options.items()})


class ScriptedCodec:
    """A token is a word. Remembers the words it has seen, so that answers can repeat them."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._words: dict[int, str] = {}

    def min_tokens(self, prompt: Prompt) -> int:
        return 0

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        match prompt:
            case TokenPrompt(token_ids=token_ids):
                return list(token_ids)
            case TextPrompt(text=text):
                return [self._remember(word) for word in text.split()]
            case ChatPrompt(messages=messages):
                text = " ".join(str(message.get("content") or "") for message in messages)
                return [self._remember(word) for word in text.split()]

    def grammar(self, spec: GrammarSpec) -> TokenGrammar:
        raise RequestRefused("invalid_request", "The scripted engine holds no answer to a grammar.", "response_format")

    def echo(self, prompt: Prompt, token_ids: Sequence[int], *, with_offsets: bool) -> tuple[str, list[int]]:
        raise RequestRefused("invalid_request", "The scripted engine repeats its prompt anyway.", "echo")

    def answer_text(self, prompt: ChatPrompt, token_ids: Sequence[int]) -> AnswerText:
        return AnswerText()

    def word(self, token_id: int) -> str:
        return self._words.get(token_id, f"t{token_id}")

    def _remember(self, word: str) -> int:
        token_id = zlib.crc32(word.encode()) % VOCAB_SIZE
        self._words[token_id] = word
        return token_id


@dataclass(slots=True)
class BlockCount:
    """How many blocks of a pool are held, by whom. A request that gives back twice, or never had any, is a bug."""

    num_blocks: int
    block_size: int
    held: dict[str, int] = field(default_factory=dict)
    peak: int = 0

    @property
    def in_use(self) -> int:
        return sum(self.held.values())

    def needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Let a request hold enough for `num_tokens`, or return False and change nothing."""
        more = self.needed(num_tokens) - self.held.get(request_id, 0)
        if more > self.num_blocks - self.in_use:
            return False
        self.held[request_id] = self.held.get(request_id, 0) + max(more, 0)
        self.peak = max(self.peak, self.in_use)
        return True

    def give_back(self, request_id: str) -> None:
        del self.held[request_id]


def scripted_info(config: EngineConfig, script: Script) -> EngineInfo:
    num_blocks = config.num_kv_blocks or DEFAULT_NUM_BLOCKS
    context = min(config.max_model_len or script.context, num_blocks * config.block_size)
    return EngineInfo(
        role=config.role,
        name=config.name or config.role,
        pid=os.getpid(),
        served_name=config.served_name,
        model_path=config.model,
        model_fingerprint="scripted",
        max_model_len=context,
        vocab_size=VOCAB_SIZE,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_cache_dtype="fp32" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        kv_bytes_per_token=4,
        weight_dtype="fp32",
        device=config.device,
        num_threads=config.num_threads or 1,
    )


def start_script(config: EngineConfig) -> Script:
    """The script of a model name; takes its time and fails as it says."""
    script = Script.parse(config.model)
    if script.start_kv not in ("", config.kv_cache_dtype):
        return script
    time.sleep(script.start_delay)
    if script.start_error:
        raise RuntimeError(script.start_error.replace("_", " "))
    return script


class ScriptedEngine:
    """A merged engine that repeats its prompts."""

    def __init__(self, config: EngineConfig, script: Script, emit: Emit, codec: ScriptedCodec) -> None:
        self.info = scripted_info(config, script)
        self._config = config
        self._script = script
        self._emit = emit
        self._codec = codec
        self._blocks = BlockCount(self.info.num_blocks, config.block_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._num_steps = 0
        self._generation_tokens = 0

    def submit(self, request: Request) -> None:
        if self._blocks.needed(request.num_prompt_tokens + 1) > self.info.num_blocks:
            raise RequestRefused("kv_pool_too_small", f"The KV pool has {self.info.num_blocks} blocks.")
        if len(self._waiting) >= self._config.max_waiting and len(self._running) >= self._config.max_num_seqs:
            raise RequestRefused("queue_full", f"{len(self._waiting)} requests are waiting; try again later.")
        self._waiting.append(request)
        self._emit(accepted(request))

    def abort(self, request_id: str) -> None:
        for requests in (self._waiting, self._running):
            for request in list(requests):
                if request.request_id == request_id:
                    requests.remove(request)
        if request_id in self._blocks.held:
            self._blocks.give_back(request_id)

    def step(self) -> bool:
        self._expire()
        self._admit()
        if not self._running:
            return False
        self._num_steps += 1
        if self._script.delay:
            time.sleep(self._script.delay)
        for request in list(self._running):
            self._advance(request)
        return True

    def next_deadline(self) -> float | None:
        return min((r.deadline_at for r in self._waiting if r.deadline_at is not None), default=None)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=self.info.num_blocks,
            num_blocks_in_use=self._blocks.in_use,
            peak_blocks_in_use=self._blocks.peak,
            num_steps=self._num_steps,
            generation_tokens=self._generation_tokens,
        )

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        self._blocks.peak = self._blocks.in_use

    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def close(self) -> None:
        pass

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            request = self._waiting[0]
            if not self._blocks.grow(request.request_id, request.num_prompt_tokens + 1):
                return
            self._start(self._waiting.popleft())

    def _start(self, request: Request) -> None:
        request.first_scheduled_at = time.monotonic()
        self._running.append(request)

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [*self._waiting, *self._running]:
            if request.deadline_at is not None and request.deadline_at <= now:
                self.abort(request.request_id)
                self._fail(request, "timeout", "The request took longer than its deadline.")

    def _fail(self, request: Request, code: str, message: str) -> None:
        self._emit(Failed(request_id=request.request_id, code=code, message=message))  # type: ignore[arg-type]

    def _advance(self, request: Request) -> None:
        if not self._blocks.grow(request.request_id, request.num_tokens + 1):
            return  # waits for blocks of others
        words = request.prompt_token_ids
        token_id = words[len(request.output_token_ids) % len(words)]
        word = self._codec.word(token_id)
        if self._script.bug and word == self._script.bug:
            raise RuntimeError("a bug, as the script says")
        request.output_token_ids.append(token_id)
        request.first_token_at = request.first_token_at or time.monotonic()
        self._generation_tokens += 1
        self._emit(TokenChunk(request_id=request.request_id, text=f"{word} ", token_ids=[token_id]))
        reason = self._finish_reason(request)
        if reason is not None:
            self._finish(request, reason)

    def _finish_reason(self, request: Request) -> FinishReason | None:
        if len(request.output_token_ids) >= request.max_tokens:
            return "length"
        if len(request.output_token_ids) >= self._script.tokens and not request.sampling.ignore_eos:
            return "stop"
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._running.remove(request)
        self._blocks.give_back(request.request_id)
        first_scheduled = request.first_scheduled_at or request.arrived_at
        first_token = request.first_token_at or first_scheduled
        self._emit(
            Done(
                request_id=request.request_id,
                finish_reason=reason,
                usage=Usage(prompt_tokens=request.num_prompt_tokens, completion_tokens=len(request.output_token_ids)),
                timings=Timings(
                    queue_seconds=first_scheduled - request.arrived_at,
                    prefill_seconds=first_token - first_scheduled,
                    decode_seconds=time.monotonic() - first_token,
                    peak_kv_blocks={self.info.role: self._blocks.peak},
                ),
            )
        )
