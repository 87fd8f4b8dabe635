"""Real vLLM servers on the CPU: a prefill and a decode server with KV over NIXL, and a merged one beside them.

`kvgate bench --install vllm` makes the environment; KVGATE_BENCH_VLLM says where it is, if not in .peers/vllm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from support.gateway_process import wait_until

MODEL = "smollm2"
READY_SECONDS = 300.0
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu","kv_load_failure_policy":"fail"}'
_SAMPLE = r"^{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$"


def environment() -> Path | None:
    """Where vLLM is installed; None = nowhere."""
    folder = Path(os.environ.get("KVGATE_BENCH_VLLM", ".peers/vllm")).absolute()
    return folder if (folder / "bin" / "vllm").exists() else None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class VllmServer:
    """One `vllm serve`. With a side channel it takes part in transfers."""

    folder: Path
    model: Path
    log: Path
    core: int
    side_channel: int | None = None
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(self.folder / "bin" / "vllm"), "serve", str(self.model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "2048", "--enforce-eager"]
        command += ["--max-num-seqs", "16", "--enable-prompt-tokens-details"]
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
        }
        if self.side_channel is not None:
            command += ["--kv-transfer-config", NIXL]
            env |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel),
            }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> None:
        wait_until(self._is_ready, f"vLLM is ready; see {self.log}", READY_SECONDS)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"vLLM ended:\n{self.log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        """At once, with the processes that it has started."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, how)
            process.wait(30)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def step(self) -> None:
        """A request of one token, past the gateway."""
        fields = {"model": MODEL, "prompt": "go on", "max_tokens": 1}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(fields).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def figure(self, name: str) -> float:
        """The sum of one series; 0 where it isn't there yet."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        pattern = _SAMPLE.format(name=re.escape(name))
        return sum(float(value) for value in re.findall(pattern, text, re.M))
