"""The limit of open files goes up as far as it may, and never down."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
from gateway.cli.open_files import raise_open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_open_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
@pytest.mark.parametrize(("soft", "hard", "after"), [(64, 512, "512 512"), (300, 300, "300 300")])
def test_the_limit_is_raised_to_what_is_allowed(soft, hard, after):
    code = CODE.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == after
