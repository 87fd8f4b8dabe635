"""What talks to engines must not load what engines load."""

from __future__ import annotations

import subprocess
import sys

MODULES = "gateway.upstreams.engine.upstream, gateway.upstreams.scripted"
HEAVY = ("torch", "transformers", "numpy", "backends.core", "backends.engines", "backends.config")


def test_the_engine_upstream_imports_nothing_of_an_engine_but_its_protocol():
    code = f"import sys, {MODULES}; sys.exit(' '.join(m for m in {HEAVY} if m in sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert answer.stderr.strip() == ""
