"""Clients of Anthropic's and OpenAI's newer API, answered by an upstream that speaks only chat, or theirs."""

from __future__ import annotations

import asyncio
import json

import pytest
from web_answers import HELLO, without_comments
from web_support import (
    DONE,
    ROLE,
    USAGE,
    Flood,
    Hold,
    Reset,
    Wait,
    chunk,
    fake_upstream,
    http_answer,
    running,
    sse_answer,
    upstream_settings,
)

from gateway.service import ending
from gateway.settings.schema import KeySettings, RequestSettings, ServerSettings, Settings, TargetSettings
from support.waiting import until

PLACES = ("messages", "responses")
BODIES = {
    "messages": {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "input": "hi"},
}
GOOD = HELLO + USAGE + DONE


def calls(*entries, finish=None):
    choice = {"index": 0, "delta": {"tool_calls": list(entries)}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def call(index, call_id, name, arguments):
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def asked(place, script, *, stream=True, headers=None, settings=None, **fields):
    """(answer, record, what the upstream saw)."""
    async with (
        fake_upstream(script) as upstream,
        running(settings(upstream.url) if settings else upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.post(
            f"/v1/{place}", {**BODIES[place], "stream": stream, **fields}, headers=headers or {}
        )
        record = await gateway.record(answer)
        return answer, record, upstream


def typed(answer):
    """Every event as (name, data); the name is also the data's type."""
    found = []
    for block in answer.body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
            assert data["type"] == name
            found.append((name, data))
    return found


def said(place, answer, *, stream=True):
    """(text, reasoning, calls as (name, arguments), why it ended) in one form for both APIs, streamed or not."""
    if place == "messages":
        return _said_by_messages(typed(answer)) if stream else _said_by_message(answer.json())
    return _said_by_response(typed(answer)[-1][1]["response"] if stream else answer.json())


def _said_by_messages(events):
    blocks: dict[int, list] = {}
    reason = None
    for name, data in events:
        if name == "content_block_start":
            block = data["content_block"]
            blocks[data["index"]] = [block["type"], block.get("name", ""), ""]
        elif name == "content_block_delta":
            delta = data["delta"]
            text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            blocks[data["index"]][2] += text
        elif name == "message_delta":
            reason = data["delta"]["stop_reason"]
    parts = [blocks[index] for index in sorted(blocks)]
    found = [(name, json.loads(text or "{}")) for kind, name, text in parts if kind == "tool_use"]
    return _joined(parts, "text"), _joined(parts, "thinking"), found, reason


def _joined(parts, kind):
    return "".join(text for found, _, text in parts if found == kind)


def _said_by_message(message):
    content = message["content"]
    text = "".join(block["text"] for block in content if block["type"] == "text")
    thinking = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    found = [(block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
    return text, thinking, found, message["stop_reason"]


def _said_by_response(response):
    text, reasoning, found = "", "", []
    for item in response["output"]:
        match item["type"]:
            case "message":
                text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                parts = item.get("content") or item.get("summary") or ()
                reasoning += "".join(part["text"] for part in parts)
            case "function_call":
                found.append((item["name"], json.loads(item["arguments"] or "{}")))
    reason = (response.get("incomplete_details") or {}).get("reason") or response["status"]
    return text, reasoning, found, reason


STOPPED = {"messages": "end_turn", "responses": "completed"}
CALLED = {"messages": "tool_use", "responses": "completed"}
CUT = {"messages": "max_tokens", "responses": "max_output_tokens"}


# ------------------------------------------------------------------------------------------------------------ request


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_upstream_is_asked_for_chat_completions(place, stream):
    settings = lambda url: upstream_settings(url, request=RequestSettings(temperature=0.5))  # noqa: E731
    _, _, upstream = await asked(place, sse_answer(GOOD), stream=stream, settings=settings, cache_mode="split")

    seen = upstream.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert seen.header("X-Cache-Mode") == "split"
    body = seen.json()
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["model"], body["stream"], body["temperature"]) == ("m", stream, 0.5)
    assert body.get("stream_options") == ({"include_usage": True} if stream else None)
    assert not {"cache_mode", "input", "thinking"} & set(body)


async def test_au_06_the_client_s_key_never_goes_to_the_upstream():
    def settings(url):
        return Settings(server=ServerSettings(api_base=url, api_key="sk-up"), keys=(KeySettings(key="sk-a", name="a"),))

    for place in PLACES:
        _, _, upstream = await asked(place, sse_answer(GOOD), settings=settings, headers={"x-api-key": "sk-a"})
        assert upstream.seen[0].header("Authorization") == "Bearer sk-up"
        assert "sk-a" not in str(upstream.seen[0].headers)


@pytest.mark.parametrize("place", PLACES)
async def test_st_15_an_upstream_without_stream_options_is_asked_again_without(place):
    def script(seen):
        if b"stream_options" in seen.body:
            return http_answer(b'{"error":{"message":"unknown field stream_options"}}', status="400 Bad")
        return sse_answer(ROLE, chunk("a"), chunk(finish="stop"), DONE)

    answer, record, _ = await asked(place, script)
    assert said(place, answer)[0] == "a"
    assert "prompt_tokens" not in record["timings"]


async def test_an_api_that_a_target_can_not_be_asked_in_is_a_clear_400():
    target = TargetSettings(name="t", base_url="http://127.0.0.1:9", models=("m",), dialects=("anthropic_messages",))
    async with running(Settings(targets=(target,))) as gateway:
        chat = await gateway.chat(model="m")
        response = await gateway.post("/v1/responses", BODIES["responses"])
    for answer in (chat, response):
        assert answer.status == 400
        assert "anthropic_messages" in answer.error["message"]


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_st_02_and_st_07_any_cut_and_any_line_end_give_the_same_answer(place, end):
    whole = (b":\n\n" + GOOD).replace(b"\n", end)
    for at in range(0, len(whole), 97):
        answer, record, _ = await asked(place, sse_answer(whole[:at], whole[at:]))
        assert said(place, answer) == ("平台", "", [], STOPPED[place])
        assert record["outcome"] == "ok"
        assert (record["timings"]["prompt_tokens"], record["timings"]["cached_tokens"]) == (7, 4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [100_000, 600_000, 2_000_000])
async def test_st_09_a_long_line_is_read(place, size):
    answer, _, _ = await asked(place, sse_answer(chunk("x" * size), chunk(finish="stop"), DONE))
    assert len(said(place, answer)[0]) == size


@pytest.mark.parametrize("place", PLACES)
async def test_st_03_and_st_04_comments_are_no_first_token(place):
    go = asyncio.Event()
    steps = (b": OPENROUTER PROCESSING\n\n", b":\n\n", ROLE, Wait(go), b":\n\n", chunk("a"), chunk(finish="stop"), DONE)
    async with fake_upstream(sse_answer(*steps)) as upstream, running(upstream_settings(upstream.url)) as gateway:
        task = asyncio.create_task(gateway.post(f"/v1/{place}", {**BODIES[place], "stream": True}))
        await until(lambda: upstream.seen)
        since = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - since > 0.05)
        go.set()
        answer = await task
        record = await gateway.record(answer)

    assert said(place, answer)[0] == "a"
    assert b"OPENROUTER" not in answer.body
    assert record["timings"]["time_to_first_token_seconds"] >= 0.05


TWO = [("read", {"x": 1}), ("read", {"x": 2})]
PARALLEL = {
    "one index": (calls(call(0, "a", "read", '{"x":1}')), calls(call(0, "b", "read", '{"x":2}'))),
    "no ids": (calls(call(0, "", "read", '{"x":1}')), calls(call(0, "", "read", '{"x":2}'))),
    "one id": (calls(call(0, "0", "read", '{"x":1}')), calls(call(1, "0", "read", '{"x":2}'))),
    "objects": (calls(call(0, "a", "read", {"x": 1}), call(1, "b", "read", {"x": 2})),),
    "pieces": (
        calls(call(0, "a", "read", "")),
        calls({"index": 0, "function": {"arguments": '{"x"'}}),
        calls({"index": 0, "function": {"arguments": ":1}"}}),
        calls(call(1, "b", "read", '{"x":2}')),
    ),
    "in turn": (
        calls(call(0, "a", "read", ""), call(1, "b", "read", "")),
        calls({"index": 0, "function": {"arguments": '{"x":'}}, {"index": 1, "function": {"arguments": '{"x":'}}),
        calls({"index": 0, "function": {"arguments": "1}"}}, {"index": 1, "function": {"arguments": "2}"}}),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", PARALLEL)
@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
async def test_tc_01_and_tc_02_two_calls_reach_the_client_as_two(place, form, finish):
    answer, _, _ = await asked(place, sse_answer(ROLE, *PARALLEL[form], chunk(finish=finish), DONE))
    assert said(place, answer)[2:] == (TWO, CALLED[place])


@pytest.mark.parametrize("place", PLACES)
async def test_tc_09_and_tc_10_calls_of_an_answer_in_one_piece(place):
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call(0, "a", "f", {"p": "."}), call(1, "b", "g", "")],
    }
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {}}
    for script in (http_answer(json.dumps(body).encode()),):
        for stream in (False, True):  # an upstream may answer without a stream although it was asked for one
            answer, _, _ = await asked(place, script, stream=stream)
            assert said(place, answer, stream=stream)[2:] == ([("f", {"p": "."}), ("g", {})], CALLED[place])


@pytest.mark.parametrize("place", PLACES)
async def test_a_reason_of_calls_without_any_call_is_a_stop(place):
    answer, _, _ = await asked(place, sse_answer(chunk("x"), chunk(finish="tool_calls"), DONE))
    assert said(place, answer) == ("x", "", [], STOPPED[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_st_31_an_answer_of_reasoning_alone_is_not_empty(place, field):
    thought = b'data: {"choices":[{"index":0,"delta":{"%s":"hm"}}]}\n\n' % field.encode()
    answer, _, _ = await asked(place, sse_answer(thought, chunk(finish="length"), USAGE, DONE))
    assert said(place, answer) == ("", "hm", [], CUT[place])


@pytest.mark.parametrize("place", PLACES)
async def test_an_upstream_that_streams_unasked_is_still_answered_from(place):
    answer, record, _ = await asked(place, sse_answer(GOOD), stream=False)
    assert answer.headers["Content-Type"] == "application/json"
    assert said(place, answer, stream=False)[0] == "平台"
    assert record["outcome"] == "ok"


# -------------------------------------------------------------------------------------------------------- broken ends

LIMIT = b'data: {"error":{"message":"rate limit","type":"rate_limit_error","code":429}}\n\n'
BROKEN = {
    "reset": (ROLE, chunk("a"), chunk("b"), Reset()),
    "close": (ROLE, chunk("a")),
    "cut frame": (ROLE + chunk("a"), b'data: {"cho'),
    "error": (ROLE, chunk("a"), LIMIT),
    "bad frame": (ROLE, chunk("a"), b"data: nonsense\n\n"),
    "in a call": (ROLE, calls(call(0, "a", "f", '{"x"')), Reset()),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", BROKEN)
async def test_st_10_and_st_11_a_broken_answer_ends_with_the_api_s_own_error(place, case):
    answer, record, _ = await asked(place, sse_answer(*BROKEN[case]))

    name, data = typed(answer)[-1]
    assert (answer.status, name) == (200, {"messages": "error", "responses": "response.failed"}[place])
    assert not {"message_stop", "response.completed"} & {event for event, _ in typed(answer)}
    assert record["outcome"] == ("overloaded" if case == "error" else "error")
    if case == "error" and place == "messages":
        assert data["error"] == {"type": "rate_limit_error", "message": "rate limit"}


def piece(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", [Hold(), Reset(), "comments"], ids=["silence", "a break", "comments for ever"])
async def test_what_is_missing_after_the_finish_reason_costs_nothing(place, stream, end, monkeypatch):
    """Neither the end mark nor the end of the connection comes; it is cut, and never used again."""
    monkeypatch.setattr(ending, "GRACE_SECONDS", 0.05)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = Flood(piece(b": still here\n\n")) if end == "comments" else end
    script = [head, piece(ROLE + chunk("a")), piece(chunk(finish="stop") + USAGE), last]
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.post(f"/v1/{place}", {**BODIES[place], "stream": stream})
        record = (await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}")).json()
        if not isinstance(end, Reset):
            await until(lambda: upstream.num_gone)
        await gateway.post(f"/v1/{place}", BODIES[place])

    assert said(place, answer, stream=stream)[0] == "a"
    assert (record["outcome"], record["timings"]["completion_tokens"]) == ("ok", 3)
    assert upstream.num_connections == 2


async def test_a_choice_that_has_not_begun_yet_is_waited_for(monkeypatch):
    """An upstream may begin one after the other has ended: that is no end of the answer."""
    monkeypatch.setattr(ending, "GRACE_SECONDS", 0.0)
    go, choice = asyncio.Event(), {"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}
    other = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"candidateCount": 2}}
    steps = sse_answer(ROLE + chunk("a") + chunk(finish="stop"), Wait(go), other + DONE)
    async with fake_upstream(steps) as upstream, running(upstream_settings(upstream.url)) as gateway:
        place = f"{gateway.url}/v1beta/models/m:streamGenerateContent?alt=sse"
        async with gateway.session.post(place, json=body) as response:
            await response.content.readline()
            go.set()
            text = await response.text()

    assert '"b"' in text
    assert "error" not in text


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [True, False])
async def test_st_10_a_break_before_the_first_text_is_a_5xx(place, stream):
    for steps in ((ROLE, Reset()), (ROLE,), ()):
        answer, record, _ = await asked(place, sse_answer(*steps), stream=stream)
        assert (answer.status, record["outcome"]) == (502, "error")


@pytest.mark.parametrize("steps", [(), (DONE,)])
async def test_an_12_an_answer_without_any_event_is_an_http_error_of_this_api(steps):
    answer, record, _ = await asked("messages", sse_answer(*steps))
    assert (answer.status, answer.headers["Content-Type"]) == (502, "application/json")
    assert (answer.json()["type"], answer.error["type"]) == ("error", "api_error")
    assert record["outcome"] == "error"


@pytest.mark.parametrize("place", PLACES)
async def test_st_11_an_error_frame_before_any_text_is_an_http_error(place):
    answer, _, _ = await asked(place, sse_answer(ROLE, LIMIT))
    assert answer.status == 429
    assert answer.json()["error"]["message"] == "rate limit"
    assert (answer.json().get("type") == "error") == (place == "messages")


@pytest.mark.parametrize("place", PLACES)
async def test_a_connection_that_breaks_after_the_finish_reason_costs_nothing(place):
    answer, record, _ = await asked(place, sse_answer(chunk("a"), chunk(finish="stop"), Reset()))
    assert (said(place, answer)[3], record["outcome"]) == (STOPPED[place], "ok")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (http_answer(b'{"error":{"message":"bad key","type":"authentication_error"}}', status="401 No"), 401),
        (http_answer(b"<html>nope</html>", status="400 Bad", content_type="text/html"), 400),
        (http_answer(b'{"error":"slow down"}', status="429 Many", extra="Retry-After: 7\r\n"), 429),
        (http_answer(b"", status="500 Oh"), 500),
    ],
    ids=["json", "html", "limit", "empty"],
)
async def test_st_13_an_error_status_is_told_in_the_api_s_shape(place, stream, script, status):
    answer, _, _ = await asked(place, script, stream=stream)

    assert answer.status == status
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers.get("Retry-After") == ("7" if status == 429 else None)
    error = answer.json()["error"]
    assert "<html" not in error["message"]
    assert (answer.json().get("type") == "error") == (place == "messages")


@pytest.mark.parametrize("place", PLACES)
async def test_cx_01_the_upstream_s_overflow_is_one_that_the_client_compacts_on(place):
    said_by_it = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    error = {"error": {"message": said_by_it, "type": "invalid_request_error", "code": "context_length_exceeded"}}
    answer, _, _ = await asked(place, http_answer(json.dumps(error).encode(), status="400 Bad"))

    assert answer.status == 400
    if place == "messages":
        assert answer.error["message"].startswith("prompt is too long: 5000 tokens > 4096 maximum")
    else:
        assert answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [True, False])
async def test_st_18_a_client_that_leaves_hangs_up_the_upstream(place, stream):
    async with (
        fake_upstream(sse_answer(ROLE, chunk("a"), Hold())) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        task = asyncio.create_task(gateway.post(f"/v1/{place}", {**BODIES[place], "stream": stream}))
        await until(lambda: upstream.seen)
        task.cancel()
        await until(lambda: upstream.num_gone == 1, "the upstream saw the connection end")


# --------------------------------------------------------------------------------------------- the client's own API


def event(name, **fields):
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()


STARTED = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1}
ANTHROPIC = (
    event("message_start", message={"id": "msg_1", "type": "message", "content": [], "usage": STARTED})
    + event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    + event("ping")
    + event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
    + event("content_block_stop", index=0)
    + event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3})
)
MESSAGE_STOP = event("message_stop")
RESPONSES = event("response.created", response={"id": "resp_1", "status": "in_progress"}) + event(
    "response.output_text.delta", delta="a"
)
COUNTS = {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
COMPLETED = event("response.completed", response={"id": "resp_1", "status": "completed", "usage": COUNTS})
OWN = {"messages": (ANTHROPIC, MESSAGE_STOP), "responses": (RESPONSES, COMPLETED)}


def own_api(**more):
    def settings(url):
        dialects = ("openai_chat", "openai_responses", "anthropic_messages")
        target = TargetSettings(name="t", base_url=url, api_key="sk-up", models=("m",), dialects=dialects)
        return Settings(targets=(target,), **more)

    return settings


@pytest.mark.parametrize("place", PLACES)
async def test_bytes_pass_untouched_where_the_upstream_speaks_the_client_s_api(place):
    events, last = OWN[place]
    extra = {"metadata": {"user_id": "u"}, "future_field": [1, {"a": None}], "stream_options": None}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y", "x-api-key": "sk-client"}
    answer, record, upstream = await asked(
        place, sse_answer(events + last), settings=own_api(), headers=headers, **extra
    )

    seen = upstream.seen[0]
    assert without_comments(answer.body) == events + last
    assert seen.path == f"/v1/{place}"
    assert seen.json() == {**BODIES[place], "stream": True, **extra}
    assert seen.header("anthropic-beta") == "x,y"
    assert "sk-client" not in str(seen.headers)
    key = seen.header("x-api-key") or seen.header("Authorization")
    assert key == {"messages": "sk-up", "responses": "Bearer sk-up"}[place]
    assert record["outcome"] == "ok"
    counts = [record["timings"][name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    assert counts == [9, 3, 4]


async def test_a_forgotten_version_is_filled_in():
    _, _, upstream = await asked("messages", sse_answer(ANTHROPIC, MESSAGE_STOP), settings=own_api())
    assert upstream.seen[0].header("anthropic-version") == "2023-06-01"


async def test_the_limit_of_the_settings_is_filled_in_by_each_api_s_name():
    more = {"request": RequestSettings(max_tokens=77)}
    _, _, upstream = await asked("responses", sse_answer(RESPONSES, COMPLETED), settings=own_api(**more))
    assert upstream.seen[0].json()["max_output_tokens"] == 77
    _, _, upstream = await asked("messages", sse_answer(ANTHROPIC, MESSAGE_STOP), settings=own_api(**more))
    assert upstream.seen[0].json()["max_tokens"] == 50


@pytest.mark.parametrize("place", PLACES)
async def test_st_10_own_bytes_that_break_off_end_with_the_api_s_error(place):
    cut = {"messages": ANTHROPIC[:-20], "responses": RESPONSES + COMPLETED[:40]}[place]
    for steps in ((cut, Reset()), (cut,)):
        answer, record, _ = await asked(place, sse_answer(*steps), settings=own_api())
        last = answer.body.decode().rstrip().rsplit("\n\n", 1)[-1]
        assert last.startswith({"messages": "event: error", "responses": "event: response.failed"}[place])
        assert record["outcome"] == "error"


async def test_a_missing_end_mark_is_added_once_all_is_said():
    answer, record, _ = await asked("messages", sse_answer(ANTHROPIC), settings=own_api())
    assert answer.body.endswith(MESSAGE_STOP)
    assert record["finish_reason"] == "end_turn"


OVERLOADED = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'


async def test_own_errors_pass_as_they_are_before_and_inside_a_stream():
    before, _, _ = await asked("messages", http_answer(OVERLOADED, status="529 Busy"), settings=own_api())
    frame = b"event: error\ndata: " + OVERLOADED + b"\n\n"
    first, _, _ = await asked("messages", sse_answer(frame), settings=own_api())
    inside, record, _ = await asked("messages", sse_answer(ANTHROPIC + frame), settings=own_api())

    assert (before.status, before.body) == (529, OVERLOADED)
    assert (first.status, first.body) == (529, OVERLOADED)
    assert inside.body.endswith(frame)
    assert record["outcome"] == "error"


async def test_a_failed_response_before_any_text_is_an_http_error():
    failed = {"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "slow"}}}
    frame = b"event: response.failed\ndata: " + json.dumps(failed).encode() + b"\n\n"
    answer, _, _ = await asked("responses", sse_answer(frame), settings=own_api())
    assert (answer.status, answer.error["message"], answer.error["code"]) == (429, "slow", "rate_limit_exceeded")


@pytest.mark.parametrize("place", PLACES)
async def test_an_own_answer_in_one_piece_passes_and_is_read(place):
    usage = {"input_tokens": 9, "output_tokens": 3}
    bodies = {
        "messages": {"type": "message", "content": [{"type": "text", "text": "a"}], "stop_reason": "end_turn"},
        "responses": {"status": "completed", "error": None, "output": [{"type": "message"}]},
    }
    body = json.dumps({**bodies[place], "usage": usage}).encode()
    answer, record, _ = await asked(place, http_answer(body), stream=False, settings=own_api())
    assert (answer.status, answer.body) == (200, body)
    assert record["timings"]["prompt_tokens"] == 9
    assert record["finish_reason"] in ("end_turn", "stop")
