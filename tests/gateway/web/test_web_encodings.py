"""A compressed body of a request is undone up to its ceiling, whole and exact, and cheaply whatever it is made of."""

from __future__ import annotations

import gzip
import zlib

import brotli
import pytest

from gateway.core.codings import zstd
from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.web.encodings import ENCODINGS, decode

PACK = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress, "br": brotli.compress}
PLAIN = bytes(range(256)) * 4096  # 1 MiB: several pieces of every decoder


def test_every_coding_that_is_offered_is_tried_here():
    assert set(PACK) == set(ENCODINGS)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_body_of_exactly_the_ceiling_is_taken_and_a_byte_more_is_not(name: str):
    packed = PACK[name](PLAIN)
    assert decode(packed, name, len(PLAIN)) == PLAIN
    with pytest.raises(BodyTooLarge, match="larger than"):
        decode(packed, name, len(PLAIN) - 1)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_cut_body_and_a_damaged_one_are_told_apart(name: str):
    packed = PACK[name](PLAIN)
    with pytest.raises(InvalidRequest, match=f"The {name} body is cut off"):
        decode(packed[:-1], name, len(PLAIN))
    with pytest.raises(InvalidRequest, match=f"The body is not valid {name}"):
        decode(b"\xff" * 40, name, len(PLAIN))


@pytest.mark.timeout(30)  # copying what follows at each member would take minutes
def test_very_many_members_cost_no_more_than_their_bytes():
    members = gzip.compress(b"") * 400_000 + gzip.compress(b"the end")
    assert decode(members, "gzip", 7) == b"the end"


def test_very_many_zstd_frames_without_content_are_refused():
    with pytest.raises(InvalidRequest, match="The body is not valid zstd"):
        decode(zstd.compress(b"") * 100_000, "zstd", 1000)
    few = zstd.compress(b"") * 900 + zstd.compress(b"the end")
    assert decode(few, "zstd", 7) == b"the end"
