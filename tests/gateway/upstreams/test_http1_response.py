"""Answers in HTTP/1.1 by their bytes alone: any cut into pieces means the same, and what is cut off is never whole."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from gateway.upstreams.http.http1_errors import ConnectionCut, Http1Error, InvalidHttp
from gateway.upstreams.http.http1_head import request_head
from gateway.upstreams.http.http1_response import MAX_HELD, Http1Response

T = TypeVar("T")
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@dataclass
class Line:
    """A connection that notes what is asked of it."""

    asked: list[str] = field(default_factory=list)

    def abort(self) -> None:
        self.asked.append("abort")

    def resume_reading(self) -> None:
        self.asked.append("resume")


def now(what: Coroutine[Any, Any, T]) -> T:
    """The result of something that has no need to wait."""
    try:
        what.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        what.close()
    raise AssertionError("it waits")


def arrived(*pieces: bytes, is_cut: bool = False, error: Exception | None = None) -> Http1Response:
    response = Http1Response(Line())
    for piece in pieces:
        response.feed(piece)
    if is_cut:
        response.on_end(error)
    return response


def body_of(response: Http1Response) -> bytes:
    now(response.head())
    found = b""
    while piece := now(response.read()):
        found += piece
    return found


# ------------------------------------------------------------------------------------------------------- any answer


@dataclass(frozen=True)
class Answer:
    """An answer and what it means."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    interim: bytes
    framed: bytes  # the body on the wire
    form: str

    @property
    def wire(self) -> bytes:
        fields = "".join(f"{name}:{value}\r\n" for name, value in self.headers)
        return self.interim + f"HTTP/1.1 {self.status} Some Reason\r\n{fields}\r\n".encode() + self.framed


names = st.from_regex(r"X-[A-Za-z0-9_!#-]{1,8}", fullmatch=True)
values = st.from_regex(r"( ?[a-z0-9\"=;,é中]{1,12}){0,3}", fullmatch=True).map(str.strip)
interims = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nX-A:\r\n\r\n",
            b"HTTP/1.1 102 Processing\r\nContent-Length: 0\r\n\r\n",
        ]
    ),
    max_size=2,
).map(b"".join)
extensions = st.sampled_from([b"", b";a", b";a=b", b';name="quoted; x"'])
trailers = st.sampled_from([b"", b"X-Checksum: 1\r\n", b"X-A:\r\nX-B: c\r\n"])


@st.composite
def chunks(draw: st.DrawFn, body: bytes) -> bytes:
    framed = b""
    while body:
        size = draw(st.integers(1, len(body)))
        framed += b"%x%s\r\n%s\r\n" % (size, draw(extensions), body[:size])
        body = body[size:]
    return framed + b"0%s\r\n%s\r\n" % (draw(extensions), draw(trailers))


@st.composite
def answers(draw: st.DrawFn, forms: Iterable[str] = ("length", "chunked", "end", "none")) -> Answer:
    form = draw(st.sampled_from(list(forms)))
    status = draw(st.sampled_from([204, 304] if form == "none" else [200, 201, 302, 404, 503]))
    headers = draw(st.lists(st.tuples(names, values), max_size=4))
    body = b"" if form == "none" else draw(st.binary(max_size=40) | st.just(OK + b"Content-Length: 0\r\n\r\n"))
    framed = draw(chunks(body)) if form == "chunked" else body
    said = {"length": ("Content-Length", str(len(body))), "chunked": ("transfer-encoding", "Chunked")}.get(form)
    if said is not None:
        headers.insert(draw(st.integers(0, len(headers))), said)
    return Answer(status, tuple(headers), body, draw(interims), framed, form)


def in_pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(at) if start < end]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(answers(), st.lists(st.integers(0, 10**6), max_size=12) | st.just(range(2000)))
def test_an_answer_means_the_same_in_any_pieces(answer, cuts):
    response = arrived(*in_pieces(answer.wire, cuts), is_cut=answer.form == "end")

    assert body_of(response) == answer.body
    assert (response.status, tuple(response.headers)) == (answer.status, answer.headers)
    assert response.is_complete
    assert response.can_keep_alive is (answer.form != "end")


@settings(max_examples=50, derandomize=True, deadline=None)
@given(answers(["length", "chunked", "none"]), st.lists(st.integers(0, 10**6), max_size=3))
def test_ht_a_cut_of_an_answer_is_never_its_end(answer, cuts):
    wire = answer.wire
    for length in range(len(wire)):
        response = arrived(*in_pieces(wire[:length], cuts), is_cut=True)
        with pytest.raises(ConnectionCut) as cut:
            body_of(response)
        assert cut.value.had_begun is (length > 0)
        assert not response.is_complete


@settings(max_examples=100, derandomize=True, deadline=None)
@given(answers(["end"]))
def test_an_answer_that_ends_with_the_connection_needs_a_good_end(answer):
    assert body_of(arrived(answer.wire, is_cut=True)) == answer.body
    for length in range(len(answer.wire) - len(answer.framed)):
        with pytest.raises(ConnectionCut):
            body_of(arrived(answer.wire[:length], is_cut=True))
    with pytest.raises(ConnectionCut):
        body_of(arrived(answer.wire, is_cut=True, error=ConnectionResetError()))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda junk: CHUNKED + junk) | answers().flatmap(
    lambda answer: st.tuples(st.integers(0, len(answer.wire)), st.binary(min_size=1, max_size=4)).map(
        lambda change: answer.wire[: change[0]] + change[1] + answer.wire[change[0] :]
    )
))  # fmt: skip
def test_garbage_ends_in_an_answer_or_an_error(data):
    response = arrived(*in_pieces(data, [7, 20, 33]), is_cut=True)
    try:
        body_of(response)
    except Http1Error:
        assert not response.is_complete
    assert response.has_ended


@settings(max_examples=100, derandomize=True, deadline=None)
@given(answers(["length", "chunked", "none"]), answers())
def test_a_second_answer_is_not_taken_for_more_of_the_first(answer, surplus):
    response = arrived(answer.wire + surplus.wire)

    assert body_of(response) == answer.body
    assert response.headers == list(answer.headers)
    assert not response.can_keep_alive


# ------------------------------------------------------------------------------------------------ what is no answer


@pytest.mark.parametrize(
    "wire",
    [
        b"hello\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 20 Short\r\n\r\n",
        b"HTTP/1.1 abc No\r\n\r\n",
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n",
        OK + b"Content-Length: 2, 2\r\n\r\n",
        OK + b"Content-Length: +2\r\n\r\n",
        OK + b"Content-Length: -2\r\n\r\n",
        OK + b"Content-Length: 0x2\r\n\r\n",
        OK + b"Content-Length: 99999999999999999999999\r\n\r\n",
        OK + b"Content-Length:\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: xchunked\r\n\r\n",
        OK + b"Name : value\r\n\r\n",
        OK + b"Name\r\n\r\n",
        OK + b"A: b\r\n folded\r\n\r\n",
        OK + b"A: b\rC: d\r\n\r\n",
        OK + b"A: \x00\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nxxx",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 104 Odd\r\nContent-Length: 1\r\n\r\nx" + OK + b"Content-Length: 0\r\n\r\n",
        OK + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        OK + b"X-" + b"a" * 40_000 + b": b\r\n\r\n",
        OK + b"X: a\r\n" * 300 + b"\r\n",
    ],
)
def test_a_head_that_is_not_clear_is_refused(wire):
    for pieces in ([wire], in_pieces(wire, range(0, len(wire), 1 + len(wire) // 500))):
        with pytest.raises(InvalidHttp):
            now(arrived(*pieces).head())


@pytest.mark.parametrize(
    "framed",
    [
        b"x\r\n",
        b"-1\r\n",
        b"0x2\r\nhi\r\n",
        b"ffffffffffffffffff\r\n",
        b"2\r\nhi!\r\n",
        b"2\nhi\r\n",
        b"\r\n",
        b"2\r\nhi\n0\r\n\r\n",
    ],
)
def test_a_chunk_that_is_not_clear_is_refused_after_what_came_before(framed):
    response = arrived(CHUNKED + b"3\r\nabc\r\n" + framed)
    now(response.head())
    assert now(response.read()).startswith(b"abc")
    with pytest.raises(InvalidHttp):
        body_of(response)
    assert (response.has_ended, response.can_keep_alive) == (True, False)


@pytest.mark.parametrize(
    "endless",
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (OK, b"X: " + b"a" * 500 + b"\r\n"),
        (OK + b"X: ", b"a" * 500),
        (b"HTTP/1.1 200 ", b"O" * 500),
        (CHUNKED + b"1;", b"x" * 500),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X: " + b"a" * 500 + b"\r\n"),
        (b"", b"\r\n" * 300),
    ],
)
def test_whatever_goes_on_without_a_body_is_bounded(endless):
    start, more = endless
    response = arrived(start)
    num_bytes = 0
    while not response.has_ended:
        response.feed(more)
        num_bytes += len(more)
        assert num_bytes < 200_000
    with pytest.raises(InvalidHttp):
        body_of(response)


def test_a_body_of_very_many_small_chunks_is_no_fault():
    response = arrived(CHUNKED)
    for _ in range(20_000):
        response.feed(b"1;a=bcdefgh\r\n")
        response.feed(b"x\r\n")
    response.feed(b"0\r\n\r\n")
    assert body_of(response) == b"x" * 20_000


@pytest.mark.parametrize(
    ("head", "can_keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: upgrade\r\nUpgrade: h2c\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_whether_a_connection_can_be_used_again_is_the_servers_word(head, can_keep_alive):
    response = arrived(head + b"Content-Length: 2\r\n\r\nhi")
    assert body_of(response) == b"hi"
    assert response.can_keep_alive is can_keep_alive


def test_a_header_keeps_bytes_that_are_no_text():
    response = arrived(OK + b"X: \xff\xe9 \r\nContent-Length: 0\r\n\r\n")
    assert response.headers[0][1].encode("utf-8", "surrogateescape") == b"\xff\xe9"


def test_reading_lets_a_connection_go_on_only_while_it_is_still_this_answers():
    line = Line()
    response = Http1Response(line)
    response.feed(OK + b"Content-Length: %d\r\n\r\n" % (2 * MAX_HELD))
    response.feed(b"x" * (MAX_HELD + 1))
    assert response.num_held > MAX_HELD
    assert len(now(response.read())) == MAX_HELD + 1
    assert (line.asked, response.num_held) == (["resume"], 0)

    response.feed(b"x" * (MAX_HELD - 1))
    now(response.read())
    response.close()
    assert line.asked == ["resume"]

    line = Line()
    response = Http1Response(line)
    response.feed(OK + b"Content-Length: %d\r\n\r\n" % (2 * MAX_HELD) + b"x" * 2 * MAX_HELD)
    assert len(now(response.read())) == 2 * MAX_HELD
    response.close()
    assert line.asked == []


def test_closing_an_answer_that_is_not_complete_cuts_its_connection_once():
    line = Line()
    response = Http1Response(line)
    response.feed(OK + b"Content-Length: 5\r\n\r\n")
    response.close()
    response.close()
    assert line.asked == ["abort"]
    with pytest.raises(ConnectionCut):
        now(response.read())


# ---------------------------------------------------------------------------------------------------- heads of ours


@pytest.mark.parametrize(
    ("url", "start"),
    [
        ("http://h.example", "POST / HTTP/1.1\r\nHost: h.example\r\n"),
        ("http://h.example:80/v1/x?a=b%20c#f", "POST /v1/x?a=b%20c HTTP/1.1\r\nHost: h.example\r\n"),
        ("https://h.example:443/", "POST / HTTP/1.1\r\nHost: h.example\r\n"),
        ("https://h.example:80/", "POST / HTTP/1.1\r\nHost: h.example:80\r\n"),
        ("http://[::1]:8000/é", "POST /%C3%A9 HTTP/1.1\r\nHost: [::1]:8000\r\n"),
        ("http://bücher.example/", "POST / HTTP/1.1\r\nHost: xn--bcher-kva.example\r\n"),
    ],
)
def test_the_first_lines_of_a_request(url, start):
    head = request_head("POST", URL(url), {"A": "b", "C": ""}, 7)
    assert head == (start + "A: b\r\nC: \r\nContent-Length: 7\r\n\r\n").encode()


def test_a_request_without_a_body_says_no_length():
    assert request_head("GET", URL("http://h/x"), {}, None) == b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize("bad", ["a\r\nX: y", "a\nb", "a\rb", "a\0b", "a\r\n", "\n"])
def test_no_name_or_value_breaks_out_of_its_line(bad):
    for headers in ({"X": bad}, {bad: "x"}, {"A": "b", "X": bad, "C": "d"}):
        with pytest.raises(ValueError, match="line break"):
            request_head("POST", URL("http://h/"), headers, 0)


def test_bytes_of_a_client_that_are_no_text_go_on_as_they_are():
    head = request_head("POST", URL("http://h/"), {"User-Agent": "é" + b"\xff".decode("utf-8", "surrogateescape")}, 0)
    assert b"User-Agent: \xc3\xa9\xff\r\n" in head
