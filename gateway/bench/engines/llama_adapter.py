"""llama.cpp behind /v1/completions, run by the Python of its own environment: `python -I llama_adapter.py FILE.gguf`.

The server that comes with llama-cpp-python takes no token ids, cannot ignore the end of a text and streams no usage.
This one drives the same library with the ids it is sent, one request at a time; the library itself finds the longest
prefix of the request before. Standard library and llama_cpp alone: nothing of this project is importable here.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any


class Model:
    """One context of llama.cpp. Requests wait for each other."""

    def __init__(self, file: str, *, max_model_len: int, num_threads: int) -> None:
        llama_cpp = import_module("llama_cpp")
        self._llama: Any = llama_cpp.Llama(
            file, n_ctx=max_model_len, n_threads=num_threads, n_threads_batch=num_threads, n_batch=512, verbose=False
        )
        self._turn = threading.Lock()

    def answer(self, prompt: list[int], max_tokens: int) -> Iterator[str]:
        """Text of each token, greedy; the end of a text is a token like any other."""
        with self._turn:
            tokens = self._llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
            for _, token in zip(range(max_tokens), tokens, strict=False):
                yield self._llama.detokenize([token], special=True).decode("utf-8", "replace")


class Handler(BaseHTTPRequestHandler):
    model: Model

    def do_GET(self) -> None:
        self._json({"object": "list", "data": [{"id": "gguf", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, max_tokens = body["prompt"], body["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for text in self.model.answer(prompt, max_tokens):
                self._event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": max_tokens}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.close_connection = True  # the client has left, and its request ends with it

    # No `override`: this runs where only the standard library is certain, and Python 3.11's typing has none.
    def log_message(self, format: str, *args: object) -> None:  # type: ignore[explicit-override]
        """A line per request would be written while the next is measured."""

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    Handler.model = Model(options.file, max_model_len=options.max_model_len, num_threads=options.threads)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
