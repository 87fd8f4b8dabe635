"""The scanner of server-sent events: whatever the split and the line ends, the same frames and the same bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from gateway.core.sse_scan import FrameTooLong, SseScanner

LINES = [
    b'data: {"a":1}',
    b"",
    b": hi",
    b"",
    b"event: x",
    b"data: {",
    b'data: "b":2}',
    b"id: 4",
    b"",
    b"data: [DONE]",
    b"",
]
DATA = [b'{"a":1}', b'{\n"b":2}', b"[DONE]"]


def scan(parts, scanner=None):
    scanner = scanner or SseScanner()
    frames = [frame for part in parts for frame in scanner.feed(part)]
    last = scanner.finish()
    return [*frames, last] if last is not None else frames


def payloads(frames):
    return [frame.data for frame in frames if frame.data is not None]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_st_02_and_st_07_every_split_of_every_line_end_gives_the_same_frames(end, bom):
    stream = bom + end.join(LINES) + end
    for at in range(len(stream) + 1):
        frames = scan([stream[:at], stream[at : at + 2], stream[at + 2 :]])
        assert payloads(frames) == DATA
        assert b"".join(frame.raw for frame in frames) == stream
        assert [frame.event for frame in frames if frame.event] == ["x"]


@given(st.lists(st.sampled_from([*LINES, b"data: x", b"data", b"retry: 3"]), max_size=12), st.data())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_raw_bytes_are_conserved_for_any_mix_of_line_ends_and_any_split(lines, data):
    ends = data.draw(st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=len(lines), max_size=len(lines)))
    stream = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    frames = scan(parts)
    joined = b"".join(frame.raw for frame in frames)
    assert payloads(frames) == payloads(scan([stream]))
    # Repairs only ever add a line feed.
    assert joined.replace(b"\n", b"") == stream.replace(b"\n", b"")
    assert len(joined) >= len(stream)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b'data:{"a":1}\ndata:{"b":2}\ndata:[DONE]\n', b'data:{"a":1}\n\ndata:{"b":2}\n\ndata:[DONE]\n\n'),
        (b'data: data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]', b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n'),
    ],
)
def test_st_26_broken_framing_is_mended(stream, expected):
    for at in range(len(stream) + 1):
        frames = scan([stream[:at], stream[at:]])
        assert payloads(frames) == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
        assert b"".join(frame.raw for frame in frames) == expected


def test_st_09_a_line_of_twenty_megabytes_in_small_pieces():
    frames = scan([b"data: ", *[b"x" * 65536] * 320, b"\n\n"])

    assert len(frames[0].data) == 320 * 65536


def test_a_frame_without_end_is_refused_at_the_ceiling():
    scanner = SseScanner(max_frame_bytes=1000)
    with pytest.raises(FrameTooLong):
        scan([b"x" * 400] * 3, scanner)


def test_an_event_of_very_many_lines_is_refused():
    """Each line takes more memory than its bytes do."""
    scanner = SseScanner()
    with pytest.raises(FrameTooLong, match="lines"):
        scan([b"data: a\n" * 1000] * 200, scanner)


@pytest.mark.parametrize(("num_lines", "is_mended"), [(10, True), (1000, False)])
def test_the_end_of_an_event_is_guessed_only_while_it_has_few_lines(num_lines, is_mended):
    """A guess reads all of them: after each of very many lines that would never end."""
    first = [b"{", *[b'"a":1,'] * num_lines, b'"b":2}']
    payload = b"\n".join(first)
    stream = b"".join(b"data: %s\n" % line for line in [*first, b'{"c":3}']) + b"\n"

    assert payloads(scan([stream])) == ([payload, b'{"c":3}'] if is_mended else [payload + b'\n{"c":3}'])


USUAL = [b'data: {"a":1}\n\n', b'data: {"b":"x"}\n\n', b"data: [DONE]\n\n", b": c\n\n"]
ODD = [
    b'data: {"a":\r1}\n\n',
    b'data: {"a"}\r\n\r\n',
    b'data: {"a":1}\n',
    b"event: x\n",
    b"\n",
    b"data: {\n\n",
    b'data: data: {"a":1}\n\n',
    b'data: {"a":1}\ndata: {"b":2}\n\n',
]


class LongWay(SseScanner):
    """Without the short way of usual events."""

    @override
    def _take_usual(self, chunk: bytes) -> int:
        return 0


@given(st.lists(st.sampled_from(USUAL + ODD), max_size=8), st.integers(1, 60))
@settings(max_examples=400, derandomize=True, deadline=None)
def test_the_short_way_of_usual_events_says_what_the_long_one_does(events, size):
    stream = b"".join(events)
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert scan(parts) == scan(parts, LongWay())
    assert scan([stream]) == scan([stream], LongWay())
