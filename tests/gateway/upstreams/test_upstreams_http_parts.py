"""The pure parts of the pass-through: proxies by the environment, Retry-After, content codings."""

from __future__ import annotations

import gzip
import zlib
from email.utils import formatdate

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from gateway.core.codings import zstd
from gateway.core.errors import UpstreamGone
from gateway.core.retry_after import retry_after_seconds
from gateway.settings.base_url import is_loopback
from gateway.upstreams.http.content_coding import ContentDecoder
from gateway.upstreams.http.proxies import ProxyNotSpoken, proxy_for

PROXY = "http://proxy.example:3128"
EVERYWHERE = {"http": PROXY, "https": PROXY}


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8000", "http://127.9.9.9", "http://localhost", "https://LOCALHOST.:1", "http://x.localhost", "http://[::1]:8000"],
)  # fmt: skip
def test_ht_12_loopback_never_has_a_proxy(url):
    assert is_loopback(URL(url).host)
    assert proxy_for(URL(url), {**EVERYWHERE, "all": "socks5h://h:9"}) is None


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_exempt"),
    [
        ("", "https://api.example.com", False),
        ("*", "https://api.example.com", True),
        ("example.com", "https://api.example.com", True),
        (".example.com", "https://api.example.com", True),
        ("*.example.com", "https://api.example.com", True),
        (".example.com", "https://example.com", True),
        ("EXAMPLE.COM", "https://api.Example.com.", True),
        ("example.com", "https://notexample.com", False),
        ("example.com:8443", "https://example.com:8443", True),
        ("example.com:8443", "https://example.com", False),
        ("example.com:443", "https://example.com", True),
        ("other, example.com", "https://example.com", True),
        ("other example.com", "https://example.com", True),
        ("10.0.0.0/8", "http://10.1.2.3:8000", True),
        ("10.0.0.0/8", "http://11.1.2.3", False),
        ("10.0.0.0/8", "http://ten.example", False),
        ("10.1.2.3", "http://10.1.2.3", True),
        ("1.2.3", "http://10.1.2.3", False),
        ("fd00::/8", "http://[fd00::1]:8000", True),
        ("[fd00::1]:8000", "http://[fd00::1]:8000", True),
        ("fd00::1", "http://[fd00::1]:9000", True),
        ("nonsense/99", "http://10.1.2.3", False),
    ],
)
def test_ht_12_no_proxy_in_every_form(no_proxy, url, is_exempt):
    found = proxy_for(URL(url), {**EVERYWHERE, "no": no_proxy})
    assert (found is None) is is_exempt


def test_ht_12_the_scheme_chooses_the_proxy_and_all_is_for_the_rest():
    environment = {"http": "one.example:1", "all": "http://two.example:2"}
    assert proxy_for(URL("http://h.example"), environment) == URL("http://one.example:1")
    assert proxy_for(URL("https://h.example"), environment) == URL("http://two.example:2")
    assert proxy_for(URL("https://h.example"), {}) is None


def test_ht_12_a_socks_proxy_is_refused_by_name_for_those_it_stands_before():
    environment = {"all": "socks5h://127.0.0.1:9", "no": "exempt.example"}
    assert proxy_for(URL("http://exempt.example"), environment) is None
    with pytest.raises(ProxyNotSpoken, match="socks5h"):
        proxy_for(URL("http://h.example"), environment)


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": formatdate(NOW + 90, usegmt=True)}, 90.0),
        ({"Retry-After": formatdate(NOW - 90, usegmt=True)}, None),
        ({"Retry-After": formatdate(NOW + 90).replace(" -0000", "")}, 90.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": ""}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After-Ms": "250", "Retry-After": "9"}, 0.25),
        ({"Retry-After-Ms": "x", "Retry-After": "9"}, 9.0),
    ],
)
def test_retry_after_in_seconds_milliseconds_or_as_a_date(headers, seconds):
    assert retry_after_seconds(headers, NOW) == seconds


PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstd.compress}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from(list(PACKERS)), max_size=3),
    st.binary(max_size=200).map(lambda data: data * 3000),
    st.integers(100, 5000),
)
def test_ht_01_any_chain_of_codings_in_any_pieces_is_undone(names, data, size):
    packed = data
    for name in names:
        packed = PACKERS[name](packed)
    decoder = ContentDecoder(", ".join(names))
    pieces = [piece for at in range(0, len(packed), size) for piece in decoder.decode(packed[at : at + size])]
    decoder.check_end()

    assert b"".join(pieces) == data


@pytest.mark.parametrize("name", list(PACKERS))
def test_ht_01_what_grows_a_lot_comes_in_small_pieces(name):
    pieces = ContentDecoder(name).decode(PACKERS[name](b"a" * 5_000_000))
    assert max(map(len, pieces)) <= 1024**2


@pytest.mark.parametrize("name", list(PACKERS))
def test_ht_01_damage_and_a_missing_end_are_told_apart_from_an_answer(name):
    packed = PACKERS[name](b"hello" * 1000)
    decoder = ContentDecoder(name)
    list(decoder.decode(packed[:-2]))
    with pytest.raises(UpstreamGone, match="ends too early"):
        decoder.check_end()
    with pytest.raises(UpstreamGone, match="damaged"):
        list(ContentDecoder(name).decode(b"{" + packed))


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_several_members_are_one_answer(name):
    decoder = ContentDecoder(name)
    packed = PACKERS[name](b"one ") + PACKERS[name](b"two")
    assert b"".join(decoder.decode(packed)) == b"one two"
    decoder.check_end()


def test_deflate_without_its_header_is_understood():
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(b"hello") + packer.flush()
    assert b"".join(ContentDecoder("deflate").decode(packed)) == b"hello"


def test_what_is_not_known_is_passed_as_it_is_and_says_so():
    decoder = ContentDecoder("gzip, compress")
    assert not decoder.supported
    assert list(decoder.decode(b"x")) == [b"x"]
