"""The HTTP edge: paths, methods, keys, hosts, bodies, ids."""

from __future__ import annotations

import gzip
import io
import json
import zlib

import brotli
import pytest
from backports import zstd
from web_support import local_settings, running, upstream_settings

from gateway.core.errors import GatewayError
from gateway.dialects.openai_frames import error_body
from gateway.settings.schema import KeySettings, LimitSettings, ServerSettings
from gateway.upstreams.scripted import ScriptedUpstream
from gateway.web.errors import STATUS, facts_of
from gateway.web.paths import find

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress, "br": brotli.compress}
PREFIXES = ("", "/v1", "/api", "/api/v1", "/v1/v1")
KEYS = (KeySettings(key="key-one", name="one"), KeySettings(key="key-two", name="two", mode="split"))


def subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def test_every_error_has_a_status():
    assert set(STATUS) == set(subclasses(GatewayError))


def test_a_refused_field_is_named_in_the_apis_shape():
    from gateway.core.errors import InvalidRequest

    body = json.loads(error_body(facts_of(InvalidRequest("no", param="x"))))
    assert body == {"error": {"message": "no", "type": "invalid_request_error", "param": "x", "code": None}}


@pytest.mark.parametrize("prefix", [f"{mode}{prefix}" for mode in ("", "/merged", "/split") for prefix in PREFIXES])
async def test_ht_14_every_prefix_serves_the_api(prefix):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        chat = await gateway.post(prefix + "/chat/completions", BODY)
        models = await gateway.get(prefix + "/models?client_version=1")
        one = await gateway.get(prefix + "/models/scripted")

    assert (chat.status, models.status, one.status) == (200, 200, 200)
    assert chat.headers["X-Cache-Mode"] == ("split" if prefix.startswith("/split") else "merged")
    assert [entry["id"] for entry in models.json()["data"]] == ["scripted", "scripted:merged", "scripted:split"]


@pytest.mark.parametrize(
    "path",
    ["//v1/chat/completions", "/v1/chat/completions/", "/v1//chat/completions", "/v1/chat/completions?beta=true"],
)
async def test_ht_14_spare_slashes_and_queries_are_served_and_never_redirected(path):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"
        answer = await gateway.raw(head.encode() + BODY)

    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/", "/health", "/merged", "/split/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_ht_14_probes_are_answered_without_a_key(method, path):
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        answer = await gateway.call(method, path)

    assert answer.status == 200
    assert (answer.body == b"") is (method == "HEAD")


@pytest.mark.parametrize("path", ["/v1", "/nothing", "/v1/embeddings", "/v2/chat/completions", "/v1/models/", "/%2e"])
async def test_ht_14_an_unknown_path_is_a_404_in_json(path):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post(path, BODY)

    assert answer.status in (404, 405)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.error["message"]


@pytest.mark.parametrize(("mode", "is_told"), [("pd", True), ("Split", True), ("splt", False), ("v2", False)])
async def test_a_path_with_another_spelling_of_a_mode_is_told_the_right_one(mode, is_told):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post(f"/{mode}/v1/chat/completions", BODY)

    assert answer.status == 404
    assert ("begins with /merged or /split" in answer.error["message"]) is is_told


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("PUT", "/v1/chat/completions", "POST"), ("GET", "/v1/completions", "POST"), ("POST", "/v1/models", "GET, HEAD"),
     ("OPTIONS", "/v1/chat/completions", "POST"), ("DELETE", "/", "GET, HEAD")],
)  # fmt: skip
async def test_ht_14_a_wrong_method_is_a_405_that_names_the_right_one(method, path, allow):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.call(method, path)

    assert answer.status == 405
    assert answer.headers["Allow"] == allow
    assert answer.error["message"]


def test_a_model_id_may_hold_slashes_and_colons():
    place = find("/split/v1/models/org/name:tag")
    assert (place.name, place.mode, place.tail) == ("models/*", "split", "org/name:tag")


# --------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer key-one"}, 200),
        ({"authorization": "bearer key-one"}, 200),
        ({"Authorization": "  BEARER    key-one  "}, 200),
        ({"x-api-key": "key-one"}, 200),
        ({"x-api-key": "key-one", "Authorization": "Bearer key-one"}, 200),
        ({"x-api-key": "key-two", "Authorization": "Bearer key-one"}, 401),
        ({"x-api-key": "wrong", "Authorization": "Bearer key-one"}, 401),
        ({"Authorization": "key-one"}, 401),
        ({"Authorization": "Basic key-one"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer key-on"}, 401),
        ({"Authorization": "Bearer kéy"}, 401),
        ({}, 401),
    ],
)
async def test_au_04_a_key_comes_in_either_header(headers, status):
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        chat = await gateway.post("/v1/chat/completions", BODY, headers=headers)
        models = await gateway.get("/v1/models", headers=headers)
        unknown = await gateway.get("/nothing", headers=headers)

    assert (chat.status, models.status) == (status, status)
    assert unknown.status == (404 if status == 200 else 401)
    if status == 401:
        assert chat.headers["WWW-Authenticate"] == "Bearer"
        assert chat.error["code"] == "invalid_api_key"


async def test_au_03_a_wrong_key_is_not_repeated():
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(headers={"Authorization": "Bearer FAKEWRONG"})

    assert "FAKEWRONG" not in answer.body.decode()
    assert "key-one" not in answer.body.decode()


async def test_au_04_without_keys_any_or_none_is_accepted():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        for headers in ({}, {"Authorization": "Bearer anything"}, {"x-api-key": "a", "Authorization": "Basic b"}):
            assert (await gateway.chat(headers=headers)).status == 200


async def test_a_key_chooses_the_mode_of_requests_that_do_not():
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        by_key = await gateway.chat(headers={"x-api-key": "key-two"})
        by_header = await gateway.chat(headers={"x-api-key": "key-two", "X-Cache-Mode": "merged"})

    assert (by_key.headers["X-Cache-Mode"], by_key.headers["X-Cache-Mode-Source"]) == ("split", "key")
    assert by_header.headers["X-Cache-Mode"] == "merged"


# ------------------------------------------------------------------------------------------------------ host, origin


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("127.9.9.9:1", 200), ("app.localhost", 200),
     ("box.lan:8000", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("10.0.0.5", 403)],
)  # fmt: skip
async def test_a_host_that_is_not_ours_is_refused(host, status):
    settings = local_settings(server=ServerSettings(allowed_hosts=("box.lan",)))
    async with running(settings, ScriptedUpstream()) as gateway:
        answer = await gateway.chat(headers={"Host": host})

    assert answer.status == status
    if status == 403:
        assert answer.error["type"] == "permission_error"


@pytest.mark.parametrize(
    ("origin", "status"), [("https://evil.example", 403), ("null", 403), ("http://localhost", 403)]
)
async def test_a_page_of_another_origin_is_refused_and_no_answer_invites_it(origin, status):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(headers={"Origin": origin})
        same = await gateway.chat(headers={"Origin": gateway.url})

    assert (answer.status, same.status) == (status, 200)
    assert not [name for name in same.headers if name.lower().startswith("access-control-")]


# --------------------------------------------------------------------------------------------------------------- body


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("gzip", gzip.compress(BODY), 200),
        ("x-gzip", gzip.compress(BODY), 200),
        ("gzip", gzip.compress(BODY[:10]) + gzip.compress(BODY[10:]), 200),
        ("deflate", zlib.compress(BODY), 200),
        ("deflate", zlib.compress(BODY)[2:-4], 200),
        ("gzip, deflate", zlib.compress(gzip.compress(BODY)), 200),
        ("identity", BODY, 200),
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(BODY)[:-9], 400),
        ("deflate", b"nonsense", 400),
        ("br", brotli.compress(BODY), 200),
        ("br", BODY, 400),
        ("br", brotli.compress(BODY)[:-3], 400),
        ("zstd", zstd.compress(BODY), 200),
        ("zstd", zstd.compress(BODY[:10]) + zstd.compress(BODY[10:]), 200),
        ("zstd", zstd.compress(BODY)[:-3], 400),
        ("zstd", b"\x28\xb5\x2f\xfdxx", 400),
        ("zstd", BODY, 400),
        ("", zstd.compress(BODY), 200),
        ("", b"\x28\xb5\x2f\xfdxx", 400),
        ("rot13", BODY, 415),
        ("gzip, gzip, gzip", BODY, 415),
    ],
)
async def test_ht_07_a_compressed_body_is_read_or_refused_clearly(coding, body, status):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Encoding: {coding}\r\n" if coding else ""
        answer = await gateway.raw(head.encode() + b"Connection: close\r\n\r\n" + body)

    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:300]
    if status != 200:
        assert b'{"error":{"message":' in answer


@pytest.mark.parametrize("kind", ["length", "chunked", "gzip", "deflate", "zstd", "br"])
async def test_ht_06_a_body_over_the_limit_is_a_413_and_the_next_request_works(kind):
    async def pieces():
        for _ in range(40):
            yield b" " * 65536

    settings = local_settings(limits=LimitSettings(max_request_mib=2))
    async with running(settings, ScriptedUpstream()) as gateway:
        headers = {"Content-Encoding": kind} if kind in COMPRESS else {}
        bomb = COMPRESS.get(kind, io.BytesIO)(b" " * (3 << 20))
        large = pieces() if kind == "chunked" else bomb
        async with gateway.session.post(gateway.url + "/v1/completions", data=large, headers=headers) as response:
            status, body = response.status, await response.json()
        after = await gateway.chat()

    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert after.status == 200


async def test_ht_06_a_body_of_many_megabytes_passes():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(messages=[{"role": "user", "content": "x" * (20 << 20)}])

    assert answer.status == 200


# ---------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (b"abc-123", "abc-123"),
        (b"a\xc3\xa9b", "ab"),
        (b"x" * 10_000, "x" * 128),
        (b"a\tb%0d%0aX-Evil:1", "ab%0d%0aX-Evil:1"),
    ],
)
async def test_ht_16_a_clients_id_is_made_safe_and_echoed(sent, echoed):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: " + sent + b"\r\n\r\n"
        answer = await gateway.raw(head)

    assert answer.startswith(b"HTTP/1.1 200")
    assert f"X-Client-Request-Id: {echoed}\r\n".encode() in answer


async def test_ht_16_every_answer_has_an_id_of_our_own():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answers = [await gateway.get("/nothing"), await gateway.chat(stream=True), await gateway.chat(n=3)]
        empty = await gateway.get("/health", headers={"X-Request-Id": ""})

    ids = {answer.headers["X-Request-Id"] for answer in answers}
    assert len(ids) == 3
    assert all(len(request_id) == 32 for request_id in ids)
    assert "X-Client-Request-Id" not in empty.headers


# -------------------------------------------------------------------------------------------------------------- admin


async def test_ready_says_whether_the_default_mode_is_served():
    engine = ScriptedUpstream(served_modes=())
    async with running(local_settings(), engine) as gateway:
        before = await gateway.get("/ready")
        engine.served_modes = ("split",)
        other = await gateway.get("/ready")
        engine.served_modes = ("merged",)
        after = await gateway.get("/ready")

    assert (before.status, other.status, after.status) == (503, 503, 200)
    assert before.json()["ready"] is False
    assert after.json()["targets"]["local"]["modes"] == ["merged"]


async def test_ready_with_only_an_upstream():
    async with running(upstream_settings("http://127.0.0.1:1")) as gateway:
        answer = await gateway.get("/ready")

    assert answer.status == 200
    assert answer.json()["targets"]["upstream"]["reachable"] is None


class ControlledUpstream(ScriptedUpstream):
    """A double that can also be asked for figures."""

    async def stats(self):
        from backends.protocol.messages import EngineStats

        return {"merged": EngineStats(num_running=2, peak_blocks_in_use=7, num_blocks=100)}

    async def reset_peaks(self, *, clear_prefix_cache):
        self.finished.append(f"reset {clear_prefix_cache}")

    def ready_state(self):
        return [{"role": "merged", "state": "ready", "info": {"num_threads": 2, "model_path": "/home/me/model"}}]


async def test_the_engines_figures_are_served_and_their_peaks_reset():
    engine = ControlledUpstream()
    async with running(local_settings(), engine) as gateway:
        figures = (await gateway.get("/v1/engines")).json()
        metrics = (await gateway.get("/metrics")).body.decode()
        reset = await gateway.post("/v1/admin/reset_peaks", {"clear_prefix_cache": True})
        empty = await gateway.post("/v1/admin/reset_peaks")
        bad = await gateway.post("/v1/admin/reset_peaks", {"clear_prefix_cache": "yes"})
        ready = await gateway.get("/ready")

    assert figures["engines"]["merged"]["peak_blocks_in_use"] == 7
    assert figures["engines"]["merged"]["num_waiting"] == 0
    assert figures["instances"][0]["info"]["num_threads"] == 2
    assert 'kvgate_engine_up{role="merged"} 1.0' in metrics
    assert 'kvgate_engine_up{role="decode"} 0.0' in metrics
    assert 'kvgate_engine_running{role="merged"} 2.0' in metrics
    assert (reset.status, empty.status, bad.status) == (200, 200, 400)
    assert engine.finished == ["reset True", "reset False"]
    assert "/home/me" not in ready.body.decode()


async def test_records_are_bounded():
    async with running(local_settings(limits=LimitSettings(max_records=2)), ScriptedUpstream()) as gateway:
        ids = [(await gateway.chat()).headers["X-Request-Id"] for _ in range(3)]
        found = [(await gateway.get(f"/v1/requests/{request_id}")).status for request_id in ids]

    assert found == [404, 200, 200]
