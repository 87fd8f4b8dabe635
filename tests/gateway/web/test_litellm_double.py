"""A target of litellm through the gateway, with a scripted module in litellm's place."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from web_answers import ONCE
from web_support import running

from gateway.settings.schema import RetrySettings, Settings, TargetSettings, TimeoutSettings
from gateway.upstreams.litellm_sdk.library import Library
from support.waiting import until

KEY = "sk-provider-secret-0123456789"


def part(text=None, finish=None, **delta):
    said = {**delta, **({} if text is None else {"content": text})}
    return {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}, "cost": 9}
COUNTS = {"id": "c", "created": 1, "model": "m", "choices": [], "usage": USAGE}
GOOD = (part("a"), part("b"), part(finish="stop"), COUNTS)


class ScriptedStream:
    """Says its parts; an exception is raised, None is waited on for ever."""

    def __init__(self, parts, received_finish_reason="stop"):
        self.parts = list(parts)
        self.closed = False
        self.received_finish_reason = received_finish_reason

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.parts:
            raise StopAsyncIteration
        said = self.parts.pop(0)
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, Exception):
            raise said
        return said

    async def aclose(self):
        self.closed = True


@dataclass
class ScriptedLitellm:
    answer: Any
    seen: list[dict[str, Any]] = field(default_factory=list)
    num_loads: int = 0
    threads: list[str] = field(default_factory=list)
    openai_compatible_providers: tuple[str, ...] = ("groq",)

    def load(self):
        self.num_loads += 1
        self.threads.append(threading.current_thread().name)
        return self

    def get_llm_provider(self, *, model, api_base=None):
        provider, _, bare = model.partition("/")
        if not bare:
            raise ValueError("LLM Provider NOT provided")
        return bare, provider, None, api_base

    def get_supported_openai_params(self, *, model, custom_llm_provider):
        return ["temperature", "max_tokens", "tools", "stop"]

    async def acompletion(self, **arguments):
        self.seen.append(arguments)
        answer = self.answer(arguments) if callable(self.answer) else self.answer
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def settings(**more):
    target = TargetSettings(
        name="far", kind="litellm", api_key=KEY, models=("p/m",), params={"aws_region_name": "eu-central-1"}
    )
    return Settings(targets=(target,), **{"retry": ONCE, **more})


async def asked(double, *, path="/v1/chat/completions", more=None, **fields):
    async with running(settings(**(more or {})), library=Library(double.load)) as gateway:
        body = {"model": "p/m", "messages": [{"role": "user", "content": "hi"}], **fields}
        answer = await gateway.post(path, body)
        record = await gateway.record(answer)
        return answer, record


async def test_a_stream():
    stream = ScriptedStream(GOOD)
    double = ScriptedLitellm(stream)
    answer, record = await asked(double, stream=True, stream_options={"include_usage": True}, temperature=0.5)

    assert (answer.text(), answer.finish_reasons(), answer.done) == ("ab", ["stop"], True)
    assert answer.chunks()[-1]["usage"] == {name: value for name, value in USAGE.items() if name != "cost"}
    assert record["timings"]["cached_tokens"] == 1
    assert stream.closed
    assert double.seen[0] == {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "model": "p/m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "api_key": KEY,
        "aws_region_name": "eu-central-1",
        "max_retries": 0,
        "num_retries": 0,
        "timeout": 601.0,
    }


async def test_an_answer_in_one_piece():
    message = {"content": "hello", "role": "assistant", "provider_specific_fields": {"x": 1}}
    said = {"id": "c", "created": 1, "model": "m", "usage": USAGE}
    double = ScriptedLitellm({**said, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    answer, record = await asked(double)

    choice = answer.json()["choices"][0]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    assert record["timings"]["completion_tokens"] == 2
    assert record["cost_usd"] is None  # the table doesn't know p/m


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_clients_of_other_apis_are_translated(path):
    body = {"input": "hi", "messages": None} if path == "/v1/responses" else {"max_tokens": 5}
    answer, record = await asked(ScriptedLitellm(ScriptedStream(GOOD)), path=path, stream=True, **body)
    last = answer.body.decode().rstrip().rsplit("\n\n", 1)[-1]
    assert (answer.status, record["outcome"]) == (200, "ok")
    assert last.startswith(("event: message_stop", "event: response.completed"))


async def test_an_api_that_can_not_be_translated_is_refused():
    double = ScriptedLitellm(ScriptedStream(GOOD))
    answer, _ = await asked(double, path="/v1/completions", prompt="x", messages=None)
    assert (answer.status, double.seen) == (400, [])


# ------------------------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize(
    "stream",
    [
        ScriptedStream((part("a"), part(finish="stop")), received_finish_reason=None),  # litellm's own making
        ScriptedStream((part("a"),)),
        ScriptedStream((part("a"), ConnectionResetError())),
        ScriptedStream((part("a"), KeyError("x"))),
    ],
    ids=["made up", "no end", "reset", "bug"],
)
async def test_st_10_an_end_that_nobody_told_is_an_error(stream):
    answer, record = await asked(ScriptedLitellm(stream), stream=True)
    assert (answer.status, answer.finish_reasons(), answer.done) == (200, [], False)
    assert "error" in answer.chunks()[-1]
    assert record["outcome"] == "error"
    assert stream.closed


@pytest.mark.parametrize("parts", [(), (part("", role="assistant"),), (KeyError("x"),)], ids=["empty", "role", "bug"])
async def test_st_10_nothing_said_is_an_http_error(parts):
    answer, record = await asked(ScriptedLitellm(ScriptedStream(parts)), stream=True)
    assert (answer.status, record["outcome"]) == (502, "error")


class AuthenticationError(Exception):
    status_code = 401
    message = f"litellm.AuthenticationError: PException - no such key: {KEY}"


@pytest.mark.parametrize("stream", [True, False])
async def test_au_03_an_error_tells_no_key_to_anybody(stream, caplog):
    caplog.set_level(logging.DEBUG)
    answer, _ = await asked(ScriptedLitellm(AuthenticationError(KEY)), stream=stream)
    assert (answer.status, answer.error["message"]) == (401, "Upstream 'far': no such key: ***")
    assert KEY not in caplog.text


async def test_a_key_in_an_answer_is_blotted_out():
    answer, _ = await asked(
        ScriptedLitellm(ScriptedStream((part(f"your key is {KEY}"), part(finish="stop")))), stream=True
    )
    assert answer.text() == "your key is ***"


async def test_silence_ends_before_and_within_an_answer():
    more = {"timeouts": TimeoutSettings(first_byte_seconds=0.1, idle_seconds=0.1)}
    for answer in (None, ScriptedStream((None,))):
        said, _ = await asked(ScriptedLitellm(answer), more=more, stream=True)
        assert said.status == 504
    stream = ScriptedStream((part("a"), None))
    said, record = await asked(ScriptedLitellm(stream), more=more, stream=True)
    assert (said.status, record["outcome"], stream.closed) == (200, "timeout", True)


async def test_st_18_a_client_that_leaves_closes_the_stream():
    stream = ScriptedStream((part("a"), None))
    double = ScriptedLitellm(stream)
    async with running(settings(), library=Library(double.load)) as gateway:
        task = asyncio.create_task(gateway.chat(model="p/m", stream=True))
        await until(lambda: not stream.parts)
        task.cancel()
        await until(lambda: stream.closed, "the stream was closed")


async def test_a_failure_before_the_first_token_is_tried_again():
    answers = [ConnectionRefusedError(), ScriptedStream(GOOD)]
    double = ScriptedLitellm(lambda _: answers.pop(0))
    answer, record = await asked(double, more={"retry": RetrySettings(first_delay_seconds=0)}, stream=True)
    assert (answer.text(), len(double.seen)) == ("ab", 2)
    assert [attempt["outcome"] for attempt in record["attempts"]][-1] == "ok"


# ------------------------------------------------------------------------------------------------------ the library


async def test_it_is_loaded_once_in_a_thread_and_only_when_it_is_used():
    double = ScriptedLitellm(lambda _: ScriptedStream(GOOD))
    async with running(settings(), library=Library(double.load)) as gateway:
        listed = (await gateway.get("/v1/models")).json()["data"]
        ready = (await gateway.get("/ready")).json()
        assert double.num_loads == 0
        answers = await asyncio.gather(*(gateway.chat(model="p/m", stream=True) for _ in range(5)))

    assert [entry["id"] for entry in listed] == ["p/m"]
    assert ready["targets"]["far"]["kind"] == "litellm"
    assert [answer.text() for answer in answers] == ["ab"] * 5
    assert double.num_loads == 1
    assert double.threads[0] != threading.main_thread().name


async def test_without_the_package_the_answer_names_the_command_that_installs_it():
    def load():
        raise ImportError(name="litellm")

    async with running(settings(), library=Library(load)) as gateway:
        answer = await gateway.chat(model="p/m")
    assert answer.status == 502
    assert "pip install 'kvgate[litellm]'" in answer.error["message"]


async def test_a_model_without_a_provider_is_the_client_s_to_mend():
    async with running(settings(), library=Library(ScriptedLitellm(None).load)) as gateway:
        answer = await gateway.chat(model="m", headers={"X-Cache-Backend": "far"})
    assert (answer.status, answer.error["param"]) == (400, "model")


def test_the_gateway_itself_does_not_import_it():
    code = "import sys, gateway.app, gateway.cli.serve; sys.exit('litellm' in sys.modules or 'httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_its_loggers_reach_nobody():
    from gateway.upstreams.litellm_sdk.library import silence

    logger = logging.getLogger("tests.litellm.double")
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logging.getLogger().addHandler(handler)
    try:
        silence(logger)
        logger.critical("a key: %s", KEY)
    finally:
        logging.getLogger().removeHandler(handler)
    assert heard == []


async def test_unknown_fields_are_said_to_have_no_effect():
    double = ScriptedLitellm(ScriptedStream(GOOD))
    answer, record = await asked(double, stream=True, foo=1, api_base="http://127.0.0.1:1")
    assert "foo, api_base is unknown there" in answer.headers["X-Kvgate-Notice"]
    assert any("foo" in notice for notice in record["notices"])
    assert "api_base" not in double.seen[0]
    assert json.dumps(record).count(KEY) == 0
