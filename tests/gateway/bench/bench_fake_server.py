"""A completions server for tests of starting and stopping, run as a program: `python bench_fake_server.py --port N`.

It writes its process id, and that of a child it starts on request, so that a test can see what is left of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--pids", type=Path, required=True)
parser.add_argument("--fails", action="store_true", help="ends at once, with a word on why")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--ignores-term", action="store_true")
parser.add_argument("--child", action="store_true")
parser.add_argument("--ends-at", type=int, default=0, help="ends without a word at the n-th completion")
parser.add_argument("--gap", type=float, default=0.0, help="seconds between pieces of text")
options = parser.parse_args()
numbers = itertools.count(1)  # of completions


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/ready":
            info = {"role": "merged", "vocab_size": 512, "pid": os.getpid(), "weight_dtype": "bf16"}
            self._json(503 if options.never_ready else 200, {"targets": {"local": {"instances": [{"info": info}]}}})
        else:
            self._json(200, {"data": [{"id": "fake"}]})

    def do_POST(self):
        if next(numbers) == options.ends_at:
            os._exit(3)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert all(256 <= token < 512 for token in body["prompt"]), body["prompt"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for index in range(body["max_tokens"]):
            time.sleep(options.gap * (index > 0))
            self._event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass

    def _event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


if options.fails:
    sys.exit("no weights here")
if options.ignores_term:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid()]
if options.child:
    forever = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", forever], stdout=subprocess.PIPE)
    child.stdout.readline()  # it ignores SIGTERM from here on
    pids.append(child.pid)
server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
partial = options.pids.with_suffix(".partial")
partial.write_text(" ".join(str(pid) for pid in pids))
partial.replace(options.pids)
server.serve_forever()
