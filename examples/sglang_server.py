"""What the two SGLang examples share: a server as SGLang starts it, once without and once with FlashMap. Not an example by itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "benchmarks" / "models"
# NEXTN drafts with the model's own next-token layer: 3 steps, 4 branches, 8 tokens to verify.
SPECULATION = (
    "--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8",
)  # fmt: skip
TINY_ARGUMENTS = ("--mem-fraction-static", "0.3", "--context-length", "2048", "--max-running-requests", "32")


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Adds what both examples take; the rest of the command line goes to the server."""
    parser.add_argument("--model", help="directory or name of the model")
    parser.add_argument(
        "--tiny", action="store_true", help="one GPU, a tiny DeepSeek: a few seconds a server, and no meaning in the speeds"
    )
    parser.add_argument("--backend", default="triton", help="SGLang's --attention-backend: triton or fa3")
    known, rest = parser.parse_known_args()
    if known.tiny:
        known.model = str(MODELS / "deepseek_v3_tiny")
    elif known.model is None:
        parser.error("give --model, or --tiny")
    known.server = [*(TINY_ARGUMENTS if known.tiny else ()), *(rest[1:] if rest[:1] == ["--"] else rest)]
    return known


@contextlib.contextmanager
def server(options: argparse.Namespace, *, flashmap: bool, timeout_s: float = 1800.0) -> Iterator[str]:
    """A server's address, once it answers. ``flashmap`` False: it starts with FLASHMAP_DISABLE=1, and nothing is hooked."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", options.model, "--host", "127.0.0.1", "--port", str(port),
        "--attention-backend", options.backend, *SPECULATION, *options.server,
    ]  # fmt: skip
    print(f"\nstarting a server {'with' if flashmap else 'without'} FlashMap: {' '.join(command)}", flush=True)
    process = subprocess.Popen(command, env=os.environ | {"FLASHMAP_DISABLE": "0" if flashmap else "1"}, start_new_session=True)
    try:
        deadline = time.monotonic() + timeout_s
        while not _answers(f"http://127.0.0.1:{port}/health_generate"):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode}: its output above says why")
            if time.monotonic() > deadline:
                raise SystemExit(f"the server does not answer after {timeout_s:.0f} s")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def table(headers: list[str], rows: list[list[str]]) -> str:
    """As SGLang's send_one prints it."""
    widths = [max(map(len, column)) + 2 for column in zip(headers, *rows, strict=True)]
    line = "+".join(("", *("-" * width for width in widths), ""))
    body = ["|".join(("", *(cell.center(width) for cell, width in zip(row, widths, strict=True)), "")) for row in (headers, *rows)]
    return "\n".join((line, body[0], line, *body[1:], line))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
