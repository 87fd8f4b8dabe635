"""The unified upstream behind the whole application: bytes in, bytes out, and everything that can break between."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from multidict import CIMultiDict
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
from yarl import URL

from gateway.service import ending
from gateway.settings.schema import (
    KeySettings,
    RequestSettings,
    RouteSettings,
    ServerSettings,
    Settings,
    TargetSettings,
    TimeoutSettings,
)
from support.waiting import until

WHOLE = {
    "id": "x",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}
PLAIN = http_answer(json.dumps(WHOLE).encode())


async def streamed(*steps, settings=None, extra=b"", **fields):
    async with (
        fake_upstream(sse_answer(*steps, extra=extra)) as upstream,
        running(settings(upstream.url) if settings else upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=True, **fields)
        return answer, await gateway.record(answer), upstream


# ------------------------------------------------------------------------------------------------------------ bytes


async def test_st_02_the_stream_is_the_same_for_every_split():
    whole = HELLO + DONE
    for at in range(0, len(whole), 7):
        answer, record, _ = await streamed(whole[:at], whole[at:])
        assert without_comments(answer.body) == whole
        assert answer.text() == "平台"
        assert record["outcome"] == "ok"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_st_07_every_line_end_passes_unchanged(end):
    whole = (HELLO + DONE).replace(b"\n", end)
    for at in (1, len(whole) // 2, len(whole) - 1):
        answer, record, _ = await streamed(whole[:at], whole[at:])
        assert without_comments(answer.body).strip() == whole.strip()
        assert answer.done
        assert record["finish_reason"] == "stop"


async def test_st_03_and_st_04_comments_stay_comments_and_are_no_first_token():
    go = asyncio.Event()
    steps = (b": OPENROUTER PROCESSING\n\n", b":\n\n", ROLE, Wait(go), b":\n\n", chunk("a"), chunk(finish="stop"), DONE)
    async with (
        fake_upstream(sse_answer(*steps)) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        task = asyncio.create_task(gateway.chat(model="m", stream=True))
        await until(lambda: upstream.seen)
        since = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - since > 0.05)
        go.set()
        answer = await task
        record = await gateway.record(answer)

    assert answer.text() == "a"
    assert answer.body.count(b": OPENROUTER PROCESSING\n\n") == 1
    assert record["timings"]["time_to_first_token_seconds"] >= 0.05


@pytest.mark.parametrize("size", [100_000, 600_000, 2_000_000])
async def test_st_09_a_long_line_passes(size):
    answer, record, _ = await streamed(chunk("x" * size), chunk(finish="stop"), DONE)

    assert len(answer.text()) == size
    assert record["outcome"] == "ok"


@pytest.mark.parametrize(
    "stream",
    [
        b'data:{"choices":[{"delta":{"content":"a"}}]}\ndata:{"choices":[{"delta":{},"finish_reason":"stop"}]}\n'
        b"data:[DONE]\n",
        chunk("a") + b"\n\n" + chunk(finish="stop") + b"\n" + DONE,
        b"event: message\n" + chunk("a") + chunk(finish="stop") + DONE,
        b"\xef\xbb\xbf" + chunk("a") + chunk(finish="stop") + DONE,
        chunk("a") + chunk(finish="stop"),
        chunk("a") + chunk(finish="stop") + b"data:[DONE]",
        b'data: {"choices":[{"delta":\ndata: {"content":"a"}}]}\n\n' + chunk(finish="stop") + DONE,
        b'data: data: {"choices":[{"delta":{"content":"a"}}]}\n\n' + chunk(finish="stop") + DONE,
    ],
    ids=["single", "blank-lines", "event", "bom", "no-done", "no-space-no-end", "two-data-lines", "doubled"],
)
async def test_st_26_framing_that_other_servers_get_wrong_is_read_and_mended(stream):
    answer, record, _ = await streamed(stream)

    assert record["outcome"] == "ok"
    assert answer.data()[-1] == b"[DONE]"
    if not stream.startswith(b"\xef\xbb\xbf"):
        assert answer.text() == "a"


# -------------------------------------------------------------------------------------------------------- broken ends


@pytest.mark.parametrize(
    "steps",
    [(ROLE, chunk("a"), chunk("b"), Reset()), (ROLE, chunk("a"), chunk("b")), (ROLE + chunk("a"), b'data: {"cho')],
    ids=["reset", "clean-close", "cut-frame"],
)
async def test_st_10_a_cut_stream_ends_with_an_error_event_and_nothing_clean(steps):
    answer, record, _ = await streamed(*steps)

    assert answer.status == 200
    assert json.loads(answer.data()[-1])["error"]["code"] == "upstream_gone"
    assert not answer.done
    assert answer.finish_reasons() == []
    assert record["outcome"] == "error"
    assert b'"cho\n' not in answer.body


@pytest.mark.parametrize("steps", [(ROLE, Reset()), (ROLE,), (Reset(),), ()], ids=["role", "role-eof", "empty", "eof"])
async def test_st_29_a_cut_before_the_first_text_is_a_5xx_that_clients_retry(steps):
    answer, record, _ = await streamed(*steps)

    assert answer.status == 502
    assert answer.error["type"] == "upstream_error"
    assert record["outcome"] == "error"


async def test_st_10_a_body_shorter_than_announced_is_a_failure():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5000\r\nConnection: close\r\n\r\n"
    async with (
        fake_upstream([head + b'{"choices":[]']) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m")

    assert (answer.status, answer.error["code"]) == (502, "upstream_gone")


@pytest.mark.parametrize("end", [Reset(), Hold()], ids=["breaks", "falls-silent"])
async def test_a_connection_that_ends_badly_after_the_finish_reason_costs_nothing(end):
    def impatient(url):
        return upstream_settings(url, timeouts=TimeoutSettings(idle_seconds=0.1))

    answer, record, _ = await streamed(chunk("a"), chunk(finish="length"), end, settings=impatient)

    assert answer.done
    assert record["outcome"] == "ok"


@pytest.mark.parametrize("end", [Hold(), Flood(b": still here\n\n")], ids=["silence", "comments for ever"])
async def test_the_end_mark_is_not_waited_for_as_long_as_for_a_token(end, monkeypatch):
    monkeypatch.setattr(ending, "GRACE_SECONDS", 0.05)
    answer, record, upstream = await streamed(chunk("a"), chunk(finish="stop"), end)

    assert answer.done
    assert record["outcome"] == "ok"
    assert upstream.num_gone == 1


def of_choice(index: int, content: str = "", finish: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("num_asked", "steps", "last"),
    [
        (2, (of_choice(0, "a"), of_choice(1, "b"), of_choice(0, finish="stop")), 1),
        (2, (of_choice(1, "b", "stop"), of_choice(0, "a")), 0),
        (2, (of_choice(0, "a", "stop"),), 1),
        (1, (of_choice(0, "a"), of_choice(1, "b"), of_choice(0, finish="stop")), 1),
    ],
    ids=["first-ended", "second-ended", "second-not-begun", "more-than-asked"],
)
async def test_st_10_an_answer_is_whole_only_when_each_of_its_choices_has_ended(num_asked, steps, last):
    cut, record, _ = await streamed(*steps, Reset(), n=num_asked)
    whole, _, _ = await streamed(*steps, of_choice(last, finish="length"), Reset(), n=num_asked)

    assert (cut.done, record["outcome"]) == (False, "error")
    assert whole.done


@pytest.mark.parametrize("code", [429, "429"])
async def test_st_29_an_error_frame_before_any_text_is_an_http_error(code):
    frame = b"data: " + json.dumps({"error": {"message": "rate limit", "code": code}}).encode() + b"\n\n"
    answer, record, _ = await streamed(ROLE, frame)

    assert answer.status == 429
    assert answer.error["message"] == "rate limit"
    assert record["outcome"] == "overloaded"


async def test_st_29_an_error_frame_after_text_passes_as_it_is_and_ends_the_stream():
    frame = b'data: {"error":{"message":"gone","type":"invalid_request_error","code":"request_timeout"}}\n\n'
    answer, record, _ = await streamed(ROLE, chunk("a"), frame, DONE)

    assert answer.body.endswith(frame)
    assert not answer.done
    assert record["outcome"] == "error"


# ------------------------------------------------------------------------------------------------------ error answers


async def test_st_10_an_engine_that_gives_up_is_no_good_end_though_its_stream_is_whole():
    answer, record, _ = await streamed(ROLE, chunk("a"), chunk(finish="error"), DONE)

    assert json.loads(answer.data()[-1])["error"]["type"] == "upstream_error"
    assert b'"content": "a"' in answer.body
    assert not answer.done
    assert record["outcome"] == "error"


async def test_st_10_an_engine_that_gives_up_is_no_good_answer_in_one_piece():
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "error"}
    body = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
    async with fake_upstream(http_answer(body)) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m")

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")


@pytest.mark.parametrize("stream", [True, False])
async def test_st_13_an_error_status_passes_with_its_body_and_retry_after(stream):
    script = http_answer(
        b'{"error":{"message":"slow down","type":"t"}}', status="429 Too Many", extra="Retry-After: 7\r\n"
    )
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=stream)

    assert answer.status == 429
    assert answer.headers["Retry-After"] == "7"
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.json() == {"error": {"message": "slow down", "type": "t"}}


@pytest.mark.parametrize(
    ("body", "kind"), [(b"<html>nope</html>", "text/html"), (b"plain words", "text/plain"), (b"", "text/plain")]
)
async def test_st_13_an_error_that_is_no_json_is_wrapped(body, kind):
    async with (
        fake_upstream(http_answer(body, status="401 No", content_type=kind)) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=True)

    assert answer.status == 401
    assert answer.error["type"] == "authentication_error"
    assert "<html>" not in answer.error["message"]
    assert "401" in answer.error["message"]


@pytest.mark.parametrize(("status", "is_told"), [(401, True), (403, True), (400, False)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_an_upstream_that_refuses_its_key_is_not_taken_for_this_gateway(path, status, is_told):
    async with (
        fake_upstream(http_answer(b'{"error":{"message":"no"}}', status=f"{status} No")) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        answer = await gateway.post(path, body)

    assert answer.status == status
    notice = f"the {status} is upstream's and not this gateway's: check the key"
    assert (notice in answer.headers.get("X-Kvgate-Notice", "")) is is_told


async def test_an_upstream_that_is_not_there_is_a_502_that_names_it():
    async with running(upstream_settings("http://127.0.0.1:1")) as gateway:
        answer = await gateway.chat(model="m")

    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert "http://127.0.0.1:1/v1/chat/completions" in answer.error["message"]


# ------------------------------------------------------------------------------------------------------------- limits


async def test_st_23_only_silence_is_limited_not_the_length_of_an_answer():
    def settings(url):
        return upstream_settings(url, timeouts=TimeoutSettings(idle_seconds=0.05, first_byte_seconds=0.05))

    answer, record, _ = await streamed(ROLE, chunk("a"), Hold(), settings=settings)
    silent, _, _ = await streamed(Hold(), settings=settings)
    async with fake_upstream([Hold()]) as upstream, running(settings(upstream.url)) as gateway:
        first = await gateway.chat(model="m", stream=True)
        session = gateway.app[_in_force_key()].current.targets["upstream"]._clients.session(URL(upstream.url))
        assert session.timeout.total is None
        assert session.connector.limit == 0

    assert json.loads(answer.data()[-1])["error"]["code"] == "upstream_timeout"
    assert record["outcome"] == "timeout"
    assert (silent.status, first.status) == (504, 504)


def _in_force_key():
    from gateway.web.keys import IN_FORCE

    return IN_FORCE


@pytest.mark.parametrize("stream", [True, False])
async def test_st_18_a_client_that_leaves_closes_the_upstream_connection(stream):
    steps = sse_answer(ROLE, chunk("a"), Hold()) if stream else [Hold()]
    async with fake_upstream(steps) as upstream, running(upstream_settings(upstream.url)) as gateway:
        task = asyncio.create_task(gateway.chat(model="m", stream=stream))
        await until(lambda: upstream.seen)
        task.cancel()
        await until(lambda: upstream.num_gone)


async def test_the_connection_is_used_again_after_a_whole_stream():
    def script(_seen):
        body = HELLO + DONE
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        return [head + b"%x\r\n" % len(body) + body + b"\r\n", b"0\r\n\r\n"]

    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        for _ in range(3):
            assert (await gateway.chat(model="m", stream=True)).done

    assert upstream.num_connections == 1


async def test_frames_are_passed_on_when_they_come():
    go = asyncio.Event()
    steps = sse_answer(ROLE, chunk("first"), Wait(go), chunk("second"), chunk(finish="stop"), DONE)
    async with fake_upstream(steps) as upstream, running(upstream_settings(upstream.url)) as gateway:
        body = {"model": "m", "messages": [], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            read = b""
            while b"first" not in read:
                read += await response.content.readany()
            assert b"second" not in read
            go.set()
            read += await response.content.read()

    assert b"second" in read


# -------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize("asked", [None, False, True])
async def test_st_14_usage_is_asked_for_and_stripped_unless_the_client_wants_it(asked):
    options = {} if asked is None else {"stream_options": {"include_usage": asked, "other": 1}}
    answer, record, upstream = await streamed(HELLO, USAGE, DONE, **options)

    sent = upstream.seen[0].json()["stream_options"]
    assert sent["include_usage"] is True
    assert sent.get("other") == (None if asked is None else 1)
    assert (USAGE in answer.body) is bool(asked)
    assert record["timings"]["completion_tokens"] == 3
    assert record["timings"]["cached_tokens"] == 4


async def test_st_15_an_upstream_that_refuses_stream_options_is_asked_again_without():
    def script(seen):
        if b"stream_options" in seen.body:
            return http_answer(b'{"error":{"message":"unknown field stream_options"}}', status="400 Bad")
        return sse_answer(HELLO, DONE)

    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)
        record = await gateway.record(answer)

    assert answer.done
    assert len(upstream.seen) == 2
    assert "completion_tokens" not in record["timings"]
    assert "stream_options" in answer.headers["X-Kvgate-Notice"]


async def test_st_13_another_400_is_not_tried_again():
    script = http_answer(b'{"error":{"message":"bad temperature"}}', status="400 Bad")
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)

    assert answer.error["message"] == "bad temperature"
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    "first", [{"content": "x"}, {"reasoning_content": "x"}, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}]
)
async def test_mt_01_the_first_token_is_text_reasoning_or_a_tool_call(first):
    frame = b"data: " + json.dumps({"choices": [{"index": 0, "delta": first}]}).encode() + b"\n\n"
    _, with_text, _ = await streamed(ROLE, frame, chunk(finish="stop"), DONE)
    _, without, _ = await streamed(ROLE, chunk(""), chunk(finish="stop"), USAGE, DONE)

    assert with_text["timings"]["time_to_first_token_seconds"] > 0
    assert without["timings"]["time_to_first_token_seconds"] is None


# ---------------------------------------------------------------------------------------------------- what is sent on


async def test_a_plain_request_passes_byte_for_byte_both_ways():
    body = b'{ "model" : "m", "messages":[{"role":"user","content":"\\u5e73"}], "top_k":20,"foo":{"a":1e2} }'
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.post("/v1/chat/completions", body)

    assert upstream.seen[0].body == body
    assert upstream.seen[0].path == "/v1/chat/completions"
    assert answer.body == json.dumps(WHOLE).encode()


async def test_rv_15_control_fields_are_removed_and_every_other_value_keeps_its_bytes():
    body = b'{"model":"m","messages":[],"big":123456789012345678901234567890,"cacheStrategy":{"mode":"split"},"f":1e2}'
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.post("/v1/chat/completions", body)

    seen = upstream.seen[0]
    assert seen.body == b'{"model":"m","messages":[],"big":123456789012345678901234567890,"f":1e2}'
    assert seen.header("X-Cache-Mode") == "split"
    assert answer.headers["X-Cache-Mode-Requested"] == "split"
    assert answer.headers["X-Cache-Mode"] == "unknown"


async def test_what_served_is_only_what_the_upstream_confirms():
    async with (
        fake_upstream(http_answer(json.dumps(WHOLE).encode(), extra="X-Cache-Mode: split\r\n")) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m:split")

    assert answer.headers["X-Cache-Mode"] == "split"
    assert upstream.seen[0].json()["model"] == "m"


async def test_rv_01_and_settings_fill_in_only_what_is_missing():
    defaults = RequestSettings(temperature=0.3, max_tokens=9)
    async with (
        fake_upstream(PLAIN) as upstream,
        running(upstream_settings(upstream.url, request=defaults, server={"model": "default-model"})) as gateway,
    ):
        await gateway.chat(temperature=None)
        await gateway.chat(model="m", temperature=1, max_completion_tokens=3)

    first, second = (seen.json() for seen in upstream.seen)
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.3, 9, "default-model")
    assert "max_tokens" not in second
    assert second["temperature"] == 1


async def test_a_route_renames_the_model():
    async with fake_upstream(PLAIN) as upstream:
        target = TargetSettings(name="far", base_url=upstream.url)
        routes = (RouteSettings(model="nice", target="far", upstream_model="org/ugly-7b"),)
        async with running(Settings(targets=(target,), routes=routes)) as gateway:
            answer = await gateway.chat(model="nice")
            listed = (await gateway.get("/v1/models")).json()["data"]

    assert upstream.seen[0].json()["model"] == "org/ugly-7b"
    assert answer.headers["X-Cache-Backend"] == "far"
    assert "nice" in [entry["id"] for entry in listed]


async def test_au_06_ht_03_only_the_configured_key_and_harmless_headers_reach_the_upstream():
    headers = {
        "Authorization": "Bearer gateway-key", "x-api-key": "gateway-key", "Cookie": "a=b", "X-Secret": "1",
        "Proxy-Authorization": "Basic x", "OpenAI-Organization": "org", "User-Agent": "client/1",
        "Connection": "keep-alive, x-secret, openai-project", "OpenAI-Project": "p", "TE": "trailers",
    }  # fmt: skip
    keys = (KeySettings(key="gateway-key", name="k"),)
    async with (
        fake_upstream(PLAIN) as upstream,
        running(upstream_settings(upstream.url, keys=keys, server={"api_key": " sk-up\n"})) as gateway,
    ):
        answer = await gateway.chat(model="m", headers=headers)

    seen = upstream.seen[0]
    assert answer.status == 200
    assert seen.header("Authorization") == "Bearer sk-up"
    assert seen.header("OpenAI-Organization") == "org"
    assert seen.header("User-Agent") == "client/1"
    assert seen.header("Host") == f"127.0.0.1:{upstream.port}"
    assert seen.header("Accept-Encoding") == "identity"
    for name in ("Cookie", "X-Secret", "x-api-key", "Proxy-Authorization", "OpenAI-Project", "TE"):
        assert seen.header(name) is None, name
    assert "gateway-key" not in str(seen.headers)


@pytest.mark.parametrize("forward", [True, False])
async def test_au_06_a_clients_own_key_is_forwarded_only_if_switched_on(forward):
    async with (
        fake_upstream(PLAIN) as upstream,
        running(upstream_settings(upstream.url, server={"forward_client_key": forward})) as gateway,
    ):
        await gateway.chat(model="m", headers={"Authorization": "Bearer mine"})

    assert upstream.seen[0].header("Authorization") == ("Bearer mine" if forward else None)


async def test_au_06_a_gateway_key_is_never_forwarded():
    keys = (KeySettings(key="gateway-key", name="k"),)
    async with (
        fake_upstream(PLAIN) as upstream,
        running(upstream_settings(upstream.url, keys=keys, server={"forward_client_key": True})) as gateway,
    ):
        await gateway.chat(model="m", headers={"Authorization": "Bearer gateway-key"})

    assert upstream.seen[0].header("Authorization") is None


async def test_au_03_no_key_appears_in_errors_records_or_metrics():
    secret = "sk-fake-0000"
    body = {"error": {"message": "no"}}
    async with (
        fake_upstream(http_answer(json.dumps(body).encode(), status="401 No")) as upstream,
        running(upstream_settings(upstream.url, server={"api_key": secret})) as gateway,
    ):
        answer = await gateway.chat(model="m", headers={"Authorization": "Bearer FAKEWRONG"})
        pages = [await gateway.get(p) for p in ("/metrics", "/ready", "/v1/models", "/v1/engines")]
        pages.append(await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}"))

    for page in [answer, *pages]:
        text = page.body.decode() + str(page.headers)
        assert secret not in text
        assert "FAKEWRONG" not in text


@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip", "deflate", "identity"])
@pytest.mark.parametrize("stream", [True, False])
async def test_ht_01_a_compressed_answer_is_plain_for_the_client(coding, stream):
    import zlib

    plain = (HELLO + DONE) if stream else json.dumps(WHOLE | {"pad": "x" * 200_000}).encode()
    packed = plain
    for name in coding.split(", "):
        packed = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[name](packed)
    kind = b"text/event-stream" if stream else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nConnection: close\r\nContent-Encoding: "
    half = len(packed) // 2
    script = [head + coding.encode() + b"\r\n\r\n", packed[:half], packed[half:]]
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=stream, headers={"Accept-Encoding": "gzip, br, zstd"})

    assert "Content-Encoding" not in answer.headers
    assert (without_comments(answer.body) if stream else answer.body) == plain


async def test_ht_03_hop_by_hop_headers_of_the_upstream_stay_there():
    extra = "Set-Cookie: a=b\r\nKeep-Alive: timeout=5\r\nX-Powered-By: x\r\nx-ratelimit-remaining: 3\r\n"
    async with (
        fake_upstream(http_answer(json.dumps(WHOLE).encode(), extra=extra)) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m")

    assert answer.headers["x-ratelimit-remaining"] == "3"
    assert not {"Set-Cookie", "Keep-Alive", "X-Powered-By"} & set(answer.headers)


async def test_ht_12_loopback_is_never_proxied(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with fake_upstream(PLAIN) as upstream:
        for host in ("127.0.0.1", "localhost"):
            async with running(upstream_settings(f"http://{host}:{upstream.port}")) as gateway:
                assert (await gateway.chat(model="m")).status == 200
        async with running(upstream_settings("http://upstream.invalid")) as gateway:
            assert (await gateway.chat(model="m")).error["code"] == "upstream_unreachable"


@pytest.mark.parametrize("name", ["X-Kvgate-Hop", "x-kvgate-hop"])
async def test_a_request_that_comes_back_to_the_gateway_is_refused(name):
    """Also by way of proxies that spell headers anew and put them in several lines."""
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        await gateway.chat(model="m")
        headers = CIMultiDict([(name, upstream.seen[0].header("X-Kvgate-Hop")), (name, "of-another")])
        async with gateway.session.post(
            f"{gateway.url}/v1/completions", json={"model": "m"}, headers=headers
        ) as answer:
            error = (await answer.json())["error"]

    assert (answer.status, error["code"]) == (508, "loop_detected")


async def test_a_stream_is_known_by_its_type_however_that_is_spelt():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream ; Charset=UTF-8\r\nConnection: close\r\n\r\n"
    async with fake_upstream([head, HELLO, DONE]) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)
        translated = await gateway.post("/v1/responses", {"model": "m", "input": "hi", "stream": True})

    assert (answer.text(), answer.done) == ("平台", True)
    assert b"response.completed" in translated.body


async def test_au_03_the_key_is_in_no_header_either_though_the_upstream_repeats_it_there():
    secret = "sk-fake-0000"
    script = http_answer(json.dumps(WHOLE).encode(), extra=f"OpenAI-Echo: {secret}\r\nX-Request-Id: of-{secret}\r\n")
    async with (
        fake_upstream(script) as upstream,
        running(upstream_settings(upstream.url, server={"api_key": secret})) as gateway,
    ):
        answer = await gateway.chat(model="m")

    assert answer.headers["OpenAI-Echo"] == "***"
    assert secret not in str(answer.headers)


async def test_a_stream_request_that_is_answered_whole_passes_whole():
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)

    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.json() == WHOLE


async def test_ht_06_a_large_body_is_passed_on_whole():
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", messages=[{"role": "user", "content": "x" * (8 << 20)}])

    assert answer.status == 200
    assert len(upstream.seen[0].body) > 8 << 20


async def test_ht_15_the_model_list_keeps_what_the_upstream_said():
    listed = {
        "object": "list",
        "data": [{"id": "a/b:c", "max_model_len": 4096, "context_window": 4000, "owned_by": "z"}],
    }
    async with (
        fake_upstream(http_answer(json.dumps(listed).encode())) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        data = (await gateway.get("/v1/models")).json()
        one = (await gateway.get("/v1/models/a%2Fb:c")).json()
        again = (await gateway.get("/api/v1/models/a/b:c")).json()

    assert data["models"] == []
    assert data["data"][0] == one == again
    assert (one["max_model_len"], one["context_window"], one["owned_by"]) == (4096, 4000, "z")
    assert len(upstream.seen) == 1


async def test_ht_04_three_hundred_streams_at_once():
    go = asyncio.Event()
    async with (
        fake_upstream(sse_answer(ROLE, chunk("a"), Wait(go), chunk(finish="stop"), DONE)) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        tasks = [asyncio.create_task(gateway.chat(model="m", stream=True)) for _ in range(300)]
        await until(lambda: len(upstream.seen) == 300)
        go.set()
        answers = await asyncio.gather(*tasks)

    assert all(answer.done for answer in answers)


async def test_mt_04_gaps_are_divided_by_the_tokens_that_usage_counts():
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":21,"total_tokens":28}}\n\n'
    _, record, _ = await streamed(chunk("a"), chunk("b"), chunk("c"), chunk(finish="stop"), usage, DONE)
    _, unknown, _ = await streamed(chunk("a"), chunk("b"), chunk("c"), chunk(finish="stop"), DONE)

    assert record["timings"]["inter_token_seconds"]["max"] < record["timings"]["e2e_seconds"] / 10
    assert "inter_token_seconds" not in unknown["timings"]


async def test_two_targets_and_a_forced_one():
    async with fake_upstream(PLAIN) as one, fake_upstream(PLAIN) as two:
        target = TargetSettings(name="two", base_url=two.url, models=("m2",))
        settings = Settings(server=ServerSettings(api_base=one.url), targets=(target,))
        async with running(settings) as gateway:
            listed = await gateway.chat(model="m2")
            forced = await gateway.chat(model="m2", headers={"X-Cache-Backend": "upstream"})

    assert (listed.headers["X-Cache-Backend"], forced.headers["X-Cache-Backend"]) == ("two", "upstream")
    assert (len(one.seen), len(two.seen)) == (1, 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [b"<!doctype html><html></html>", b"", b"OK", b"[]"])
async def test_a_200_that_is_no_answer_is_an_error_that_points_at_the_base_url(body, stream):
    async with (
        fake_upstream(http_answer(body, content_type="text/html")) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=stream)

    assert answer.status == 502
    assert "base URL" in answer.error["message"]


async def test_mt_02_a_mode_that_an_upstream_makes_up_is_unknown():
    async with (
        fake_upstream(http_answer(json.dumps(WHOLE).encode(), extra="X-Cache-Mode: whatever-17\r\n")) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m")
        metrics = await gateway.get("/metrics")

    assert answer.headers["X-Cache-Mode"] == "unknown"
    assert b"whatever" not in metrics.body
    assert upstream.seen[0].header("X-Request-Id") == answer.headers["X-Request-Id"]
