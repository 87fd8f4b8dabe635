"""What a start that can't succeed is told to the gateway as."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.config import EngineConfig
from backends.protocol.messages import Role
from backends.server.build import StartError, build_instance
from support.tiny_model import make_tiny_llama


@pytest.mark.parametrize("role", ["merged", "decode", "prefill"])
def test_a_pool_that_holds_no_block_is_told_with_the_settings_that_enlarge_it(role: Role, tmp_path: Path):
    model = make_tiny_llama(tmp_path)
    config = EngineConfig(role=role, model=str(model), kv_cache_gib=1e-9, num_threads=1)

    with pytest.raises(StartError, match=r"^The KV pool may take .* Raise kv_cache_gib"):
        build_instance(config, emit=lambda _: None, wake=lambda: None)
