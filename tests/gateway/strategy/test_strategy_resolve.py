"""How the cache strategy of a request is found: channels, spellings, refusals, notices."""

from __future__ import annotations

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.types import CacheMode, CacheStrategy, StrategySource
from gateway.settings.schema import Settings
from gateway.strategy.resolve import BODY_FIELDS, resolve_strategy, split_model_suffix

UPSTREAM = "https://taotoken.net/api"


def make_settings(**tables: object) -> Settings:
    return Settings.model_validate(tables)


def resolve(settings: Settings | None = None, **channels: object) -> CacheStrategy:
    return resolve_strategy(settings=settings or Settings(), **channels)[0]  # type: ignore[arg-type]


def refused(settings: Settings | None = None, **channels: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        resolve(settings, **channels)
    return caught.value


CHANNELS = [
    ({"header": "split"}, StrategySource.HEADER),
    ({"body": {"cacheStrategy": "split"}}, StrategySource.BODY),
    ({"body": {"cache_strategy": {"mode": "split"}}}, StrategySource.BODY),
    ({"body": {"cache_mode": "split"}}, StrategySource.BODY),
    ({"query": {"cache_mode": "split"}}, StrategySource.QUERY),
    ({"query": {"cacheStrategy": '{"mode": "split"}'}}, StrategySource.QUERY),
    ({"path_mode": "split"}, StrategySource.PATH),
    ({"model": "smollm2:split"}, StrategySource.MODEL),
    ({"key_mode": CacheMode.SPLIT}, StrategySource.KEY),
]


@pytest.mark.parametrize(("channel", "source"), CHANNELS)
def test_each_channel_is_heard_and_named(channel, source):
    strategy = resolve(**channel)
    assert (strategy.mode, strategy.source) == (CacheMode.SPLIT, source)
    assert strategy.requested == (None if source is StrategySource.KEY else "split")


def test_without_a_word_the_settings_decide():
    settings = make_settings(cache_layout={"mode": "split", "chunk_size": 512, "enable_prefix_cache": False})
    strategy = resolve(settings)
    assert (strategy.mode, strategy.source, strategy.requested) == (CacheMode.SPLIT, StrategySource.DEFAULT, None)
    assert strategy.enable_prefix_cache is False
    assert strategy.notices == ()
    assert resolve(settings, header="merged").chunk_size == 512


@pytest.mark.parametrize("spelling", ["split", " SPLIT ", "Disaggregated", "pd"])
def test_other_spellings_are_understood_and_reported_as_spelt(spelling):
    strategy = resolve(header=spelling)
    assert strategy.mode is CacheMode.SPLIT
    assert strategy.requested == spelling.strip()


@pytest.mark.parametrize(
    ("channel", "param"),
    [
        ({"header": "both"}, "X-Cache-Mode"),
        ({"body": {"cacheStrategy": "both"}}, "cacheStrategy"),
        ({"body": {"cacheStrategy": {"mode": "both"}}}, "cacheStrategy.mode"),
        ({"body": {"cache_mode": "both"}}, "cache_mode"),
        ({"query": {"cache_mode": "both"}}, "query cache_mode"),
        ({"path_mode": "both"}, "path"),
    ],
)
@pytest.mark.parametrize("winner", [{}, {"header": "split"}])
def test_a_bad_mode_is_refused_in_any_channel_also_below_a_good_one(channel, param, winner):
    error = refused(**{**winner, **channel})
    assert error.param == param
    assert param in error.message
    assert "merged (chunked, colocated) or split (disaggregated, pd)" in error.message
    assert "'both'" in error.message


@pytest.mark.parametrize("blank", [{"header": " "}, {"body": {"cacheStrategy": None}}, {"query": {"cache_mode": ""}}])
def test_a_blank_says_nothing(blank):
    assert resolve(**blank).source is StrategySource.DEFAULT


def test_a_refusal_repeats_only_a_short_plain_part_of_what_was_sent():
    error = refused(header="é\r\n" + "x" * 10_000)
    assert error.message.isascii()
    assert len(error.message) < 250


@pytest.mark.parametrize(
    ("strategy", "param", "part"),
    [
        ({"mod": "split"}, "cacheStrategy", "allowed: mode, chunkSize"),
        ({"mode": 1}, "cacheStrategy.mode", "must be text"),
        ({"chunkSize": "512"}, "cacheStrategy.chunkSize", "whole number"),
        ({"chunkSize": True}, "cacheStrategy.chunkSize", "whole number"),
        ({"chunkSize": 0}, "cacheStrategy.chunkSize", "at least 1"),
        ({"chunkSize": 1.5}, "cacheStrategy.chunkSize", "whole number"),
        ({"chunkSize": 10**30}, "cacheStrategy.chunkSize", "from 1 to"),
        ({"kvCacheDtype": "int9"}, "cacheStrategy.kvCacheDtype", "auto, fp32"),
        ({"enablePrefixCache": "yes"}, "cacheStrategy.enablePrefixCache", "true or false"),
        ({"kvTransferProtocol": "fast"}, "cacheStrategy.kvTransferProtocol", "layer-wise"),
        ({"chunkSize": 64, "chunk_size": 128}, "cacheStrategy.chunk_size", "given twice"),
        (["split"], "cacheStrategy", "a mode or an object"),
        (7, "cacheStrategy", "a mode or an object"),
    ],
)
def test_a_bad_object_is_refused_by_field(strategy, param, part):
    error = refused(body={"cacheStrategy": strategy})
    assert error.param == param
    assert part in error.message


def test_cache_mode_takes_no_object_and_bad_json_in_a_query_is_refused():
    assert refused(body={"cache_mode": {"mode": "split"}}).param == "cache_mode"
    assert "not valid JSON" in refused(query={"cacheStrategy": "{mode"}).message


@pytest.mark.parametrize(
    "spelling",
    [
        {"mode": "split", "kvCacheDtype": "float16", "enablePrefixCache": False, "kvTransferProtocol": "request-wise"},
        {"mode": "pd", "kv_cache_dtype": "fp16", "prefix_cache": False, "transfer_protocol": "request_wise"},
    ],
)
def test_objects_in_either_case_mean_the_same(spelling):
    strategy = resolve(body={"cacheStrategy": spelling})
    assert (strategy.mode, strategy.kv_cache_dtype) == (CacheMode.SPLIT, "fp16")
    assert (strategy.enable_prefix_cache, strategy.transfer_mode) == (False, "request")
    assert strategy.notices == ()


def test_the_mode_of_a_higher_channel_wins_with_a_notice_and_the_rest_of_the_object_stays():
    strategy = resolve(header="merged", body={"cacheStrategy": {"mode": "split", "chunkSize": 256}}, path_mode="merged")
    assert (strategy.mode, strategy.source, strategy.chunk_size) == (CacheMode.MERGED, StrategySource.HEADER, 256)
    assert strategy.notices == ("X-Cache-Mode says merged and wins over cacheStrategy, which says split",)


@pytest.mark.parametrize(("asked", "used"), [(500, 512), (512, 512), (513, 576), (1, 64), (512.0, 512)])
def test_chunk_sizes_are_rounded_up_to_multiples_of_64(asked, used):
    strategy = resolve(body={"cacheStrategy": {"chunkSize": asked}})
    assert strategy.chunk_size == used
    assert any(str(used) in notice for notice in strategy.notices) == (asked != used)
    assert any("below 128" in notice for notice in strategy.notices) == (used < 128)


def test_what_has_no_effect_in_a_mode_is_said():
    split = resolve(body={"cacheStrategy": {"mode": "split", "chunkSize": 500}})
    assert split.chunk_size is None
    assert split.notices == ("chunkSize has no effect in split, where the prefill side chunks by itself",)
    merged = resolve(body={"cacheStrategy": {"mode": "merged", "kvTransferProtocol": "layer-wise"}})
    assert merged.transfer_mode is None
    assert "kvTransferProtocol has no effect in merged" in merged.notices[0]


def test_settings_of_the_engine_that_a_request_cannot_change_are_said():
    settings = make_settings(scheduler={"enable_prefix_cache": False}, transfer={"max_transfer_concurrency": 2})
    strategy = resolve(settings, body={"cacheStrategy": {"enablePrefixCache": True, "maxTransferConcurrency": 8}})
    assert len(strategy.notices) == 2
    assert "2 is used" in strategy.notices[1]


@pytest.mark.parametrize("address", ["http://169.254.169.254/", "http://h", "h", "", "http://u:p@h"])
@pytest.mark.parametrize("name", ["prefillEndpoint", "decode_base_url"])
def test_a_request_cannot_choose_where_this_server_connects_to(address, name):
    settings = make_settings(server={"api_base": UPSTREAM})
    error = refused(settings, body={"cacheStrategy": {"mode": "split", name: address}})
    assert "is not an address that this gateway is set up for" in error.message
    assert "169.254" not in error.message


def test_the_unified_upstream_may_be_named_as_both_endpoints():
    settings = make_settings(server={"api_base": UPSTREAM})
    body = {"cacheStrategy": {"mode": "split", "prefillEndpoint": UPSTREAM + "/", "decodeEndpoint": UPSTREAM}}
    strategy = resolve(settings, body=body)
    assert (strategy.prefill_endpoint, strategy.decode_endpoint) == (UPSTREAM, UPSTREAM)
    merged = resolve(settings, body=body, header="merged")
    assert merged.prefill_endpoint is None
    assert "no effect in merged" in merged.notices[-1]


@pytest.mark.parametrize(
    ("model", "name", "suffix"),
    [
        ("smollm2:split", "smollm2", "split"),
        ("a:b:merged", "a:b", "merged"),
        ("qwen:0.5b", "qwen:0.5b", None),
        ("m:Split", "m:Split", None),
        ("m:pd", "m:pd", None),
        (":split", ":split", None),
        ("split", "split", None),
        ("kept:split", "kept:split", None),
        ("m:split:", "m:split:", None),
        ("", "", None),
        (None, None, None),
    ],
)
def test_only_the_exact_suffixes_are_taken_off_a_model(model, name, suffix):
    assert split_model_suffix(model, {"kept:split"}) == (name, suffix)


def test_the_model_comes_back_without_its_suffix_also_when_another_channel_wins():
    strategy, model = resolve_strategy(settings=Settings(), header="merged", model="smollm2:split")
    assert (model, strategy.mode) == ("smollm2", CacheMode.MERGED)
    assert "wins over model suffix" in strategy.notices[0]


def test_the_salt_travels_and_the_body_fields_are_known():
    assert resolve(cache_salt="a").cache_salt == "a"
    assert BODY_FIELDS == ("cacheStrategy", "cache_strategy", "cache_mode")
