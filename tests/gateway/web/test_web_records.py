"""The list of finished requests: which there are, in which order, and whose."""

from __future__ import annotations

import pytest
from web_support import local_settings, running

from gateway.settings.schema import KeySettings, LimitSettings
from gateway.upstreams.scripted import ScriptedUpstream
from support.waiting import until

KEYS = (KeySettings(key="sk-a", name="a"), KeySettings(key="sk-b", name="b"))
PATH = "/v1/requests"


async def asked(gateway, *client_ids, **headers):
    """Requests one after the other, each once the one before has its record."""
    for client_id in client_ids:
        before = len(gateway.records)
        answer = await gateway.chat(headers={"X-Request-Id": client_id, **headers})
        assert answer.status == 200
        await until(lambda before=before: len(gateway.records) == before + 1)


async def listed(gateway, query="", **headers):
    answer = await gateway.get(PATH + query, headers=headers)
    assert answer.status == 200, answer.body
    return [record["client_request_id"] for record in answer.json()["requests"]]


async def test_the_newest_finished_request_comes_first_and_limit_cuts_the_oldest():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        assert await listed(gateway) == []
        await asked(gateway, "one", "two", "three")
        whole, cut = await listed(gateway), await listed(gateway, "?limit=2")
        (newest,) = (await gateway.get(f"{PATH}?limit=1")).json()["requests"]
        alone = (await gateway.get(f"{PATH}/{newest['request_id']}")).json()

    assert whole == ["three", "two", "one"]
    assert cut == ["three", "two"]
    assert newest == alone


async def test_twenty_are_listed_unless_more_are_asked_for():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        await asked(gateway, *(str(i) for i in range(22)))
        assert await listed(gateway) == [str(i) for i in range(21, 1, -1)]
        assert len(await listed(gateway, "?limit=22")) == 22


@pytest.mark.parametrize("limit", ["0", "-1", "51", "1.5", "", "many", "%C2%B2", "9" * 5000])
async def test_a_limit_out_of_bounds_is_a_400_that_names_them(limit):
    settings = local_settings(limits=LimitSettings(max_records=50))
    async with running(settings, ScriptedUpstream()) as gateway:
        answer = await gateway.get(f"{PATH}?limit={limit}")
        assert await listed(gateway, "?limit=50") == []

    assert answer.status == 400
    assert answer.error["param"] == "limit"
    assert "from 1 to 50" in answer.error["message"]


@pytest.mark.parametrize(("max_records", "kept"), [(2, ["three", "two"]), (0, [])])
async def test_no_limit_is_right_however_few_records_are_kept(max_records, kept):
    settings = local_settings(limits=LimitSettings(max_records=max_records))
    async with running(settings, ScriptedUpstream()) as gateway:
        for client_id in ("one", "two", "three"):
            await gateway.chat(headers={"X-Request-Id": client_id})
        await until(lambda: [record.client_request_id for record in gateway.records.newest(9)] == kept)
        assert await listed(gateway) == kept


async def test_a_key_sees_its_own_requests_and_limit_counts_them_alone():
    own, others = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        await asked(gateway, "a1", "a2", **own)
        await asked(gateway, "b1", "b2", "b3", **others)
        of_a, last_of_a, of_b = (
            await listed(gateway, **own),
            await listed(gateway, "?limit=1", **own),
            await listed(gateway, **others),
        )
        refused = await gateway.get(PATH)

    assert of_a == ["a2", "a1"]
    assert last_of_a == ["a2"]
    assert of_b == ["b3", "b2", "b1"]
    assert refused.status == 401
