"""Precedence of the channels, for every combination of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.core.spelling import KV_DTYPES, MODES, TRANSFERS
from gateway.core.types import CacheMode, StrategySource
from gateway.settings.schema import CacheLayoutSettings, Settings
from gateway.strategy.resolve import resolve_strategy

ORDER = [*StrategySource]
MODE = st.sampled_from(list(CacheMode))
CHOICES = st.fixed_dictionaries(
    {source: MODE if source is StrategySource.DEFAULT else st.none() | MODE for source in ORDER}
)


def channels_of(choices: dict[StrategySource, Any]) -> dict[str, Any]:
    suffix = choices[StrategySource.MODEL]
    return {
        "header": choices[StrategySource.HEADER],
        "body": {"cacheStrategy": choices[StrategySource.BODY]},
        "query": {"cache_mode": choices[StrategySource.QUERY] or ""},
        "path_mode": choices[StrategySource.PATH],
        "model": f"m:{suffix}" if suffix else "m",
        "key_mode": choices[StrategySource.KEY],
        "settings": Settings(cache_layout=CacheLayoutSettings(mode=choices[StrategySource.DEFAULT])),
    }


@settings(derandomize=True, max_examples=200)
@given(CHOICES)
def test_the_highest_channel_that_speaks_wins(choices):
    strategy, model = resolve_strategy(**channels_of(choices))
    winner = next(source for source in ORDER if choices[source] is not None)
    assert (strategy.source, strategy.mode, model) == (winner, choices[winner], "m")
    spoken = [source for source in ORDER[:5] if choices[source] is not None]  # key and default are no explicit channels
    losers = [source for source in spoken if choices[source] is not choices[winner]]
    assert len(strategy.notices) == (len(losers) if winner in spoken else 0)
    assert all(notice.isascii() and notice.isprintable() for notice in strategy.notices)


@settings(derandomize=True, max_examples=100)
@given(CHOICES, st.sampled_from(["header", "body", "query", "path_mode"]), st.text(min_size=1, max_size=60))
def test_a_bad_word_in_any_explicit_channel_is_refused(choices, channel, word):
    if not word.strip() or word.strip().lower() in MODES or word.lstrip().startswith("{"):
        return
    channels = channels_of(choices)
    channels[channel] = {"body": {"cacheStrategy": word}, "query": {"cache_mode": word}}.get(channel, word)
    with pytest.raises(InvalidRequest) as caught:
        resolve_strategy(**channels)
    assert caught.value.param is not None
    assert "merged" in caught.value.message
    assert caught.value.message.isprintable()


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)


@settings(derandomize=True, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(["mode", "chunkSize", "kvCacheDtype", "enablePrefixCache", "kvTransferProtocol", "x"]),
        JSON | st.sampled_from([*MODES, *KV_DTYPES, *TRANSFERS]) | st.lists(JSON, max_size=2),
    )
    | JSON
)
def test_any_json_is_either_resolved_or_refused_by_field(value):
    param = "cacheStrategy"
    try:
        strategy, _ = resolve_strategy(settings=Settings(), body={"cacheStrategy": value})
    except InvalidRequest as error:
        param = str(error.param)
    else:
        assert strategy.chunk_size is None or strategy.chunk_size % 64 == 0
        assert strategy.chunk_size is None or strategy.mode is CacheMode.MERGED
    assert param.startswith("cacheStrategy")
