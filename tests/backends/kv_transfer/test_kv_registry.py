"""Transfer backends by name: which device each is for, what is said where one can't be used, and both sides agree."""

import os
from typing import get_args

import pytest
from kv_helpers import BLOCK_SIZE, LAYOUT, as_blocks, make_cache, make_pair

from backends.kv_transfer import nixl_agent
from backends.kv_transfer.registry import BACKENDS, available, make_connect, make_pool, unfit
from backends.protocol.messages import TransferBackend


def test_every_backend_that_can_be_configured_is_known():
    assert set(BACKENDS) == set(get_args(TransferBackend))


@pytest.mark.parametrize(
    ("backend", "device", "instead"),
    [("local", "cuda:0", "'nixl' or 'cuda_ipc'"), ("cuda_ipc", "cpu", "'local' or 'nixl'"), ("local", "mps", "merged")],
)
def test_a_backend_is_refused_by_name_on_a_device_it_is_not_for(backend: TransferBackend, device: str, instead: str):
    reason = unfit(backend, device)

    assert reason is not None
    assert repr(backend) in reason
    assert repr(device) in reason
    assert instead in reason


def test_backends_that_need_nothing_are_there():
    assert unfit("local", "cpu") is None
    assert unfit("cuda_ipc", "cuda:1") is None


def test_without_nixl_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("no_such_nixl",))

    reason = available("nixl")

    assert reason is not None
    assert "no_such_nixl" in reason
    assert "pip install 'kvgate[nixl]'" in reason


def test_what_the_user_said_about_ucx_stays(monkeypatch: pytest.MonkeyPatch):
    for name in (*nixl_agent.ONE_HOST, *nixl_agent.DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_TLS", "rc")

    nixl_agent.set_defaults("DRAM")

    assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("rc", "lo")
    for name in (*nixl_agent.ONE_HOST, *nixl_agent.DEFAULTS):
        monkeypatch.delenv(name)


def test_a_local_pool_is_written_to_through_its_descriptor():
    cache = make_cache()
    memory, pool = make_pool("local", LAYOUT, device="cpu")
    connect = make_connect("local", cache, BLOCK_SIZE)
    connector = connect(make_pair("local", memory.metadata), memory.fd)

    connector.save_kv_layer(1, [2], [3], 0, 4)
    connector.close()

    assert as_blocks(pool)[1, :, 3].equal(cache[1, :, 2])
    with pytest.raises(ValueError, match="no descriptor"):
        connect(make_pair("local", b""), None)
    memory.close()


def test_a_decode_side_of_another_backend_is_refused_by_name():
    connect = make_connect("local", make_cache(), BLOCK_SIZE)

    with pytest.raises(ValueError, match=r"decode instance has 'nixl', the prefill instance 'local'"):
        connect(make_pair("nixl", b""), None)
