"""How engines find plugins, and what ours hooks in one: learned in a child process that loads it as the engine would.

diagnostics.py asks. An engine is imported in the child, never here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from flashmap.core.interface import Reason

ENTRY_POINT = "flashmap_verify"


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine finds plugins. ``strips``: spaces around the names of its allow-list do not matter, and an empty list allows all."""

    name: str
    group: str
    allow_list: str
    strips: bool


ENGINES = (
    Engine("vllm", "vllm.general_plugins", "VLLM_PLUGINS", strips=False),  # vllm 0.26 to 0.33: vllm/plugins/__init__.py, envs.py
    Engine("sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", strips=True),  # sglang 0.5.11 to 0.5.23: srt/plugins/__init__.py
)


@dataclass(frozen=True, slots=True)
class Probe:
    """What loading the plugin in a child process gave. ``error``: None, or what went wrong."""

    error: str | None = None
    hooked: tuple[str, ...] = ()
    declined: tuple[Reason, ...] = ()


def allows(engine: Engine, value: str | None) -> bool:
    """Whether the engine's allow-list with this value lets our entry point in."""
    if value is None or (engine.strips and not value):
        return True
    names = value.split(",")
    return ENTRY_POINT in ([name.strip() for name in names] if engine.strips else names)


_MARK = "flashmap-probe:"
_PROBE = f"""
import importlib, importlib.metadata, json, sys
point = next(iter(importlib.metadata.entry_points(group=sys.argv[1], name={ENTRY_POINT!r})))
point.load()()
module = importlib.import_module(point.module)
installation = getattr(module, "examine", module.install)()
hooked = [str(h) for h in installation.hooked]
declined = [(r.code, r.text, r.fix) for r in installation.declined]
print({_MARK!r} + json.dumps([hooked, declined]), flush=True)
"""


def probe_in_child(engine: Engine, *, timeout_s: float = 180.0) -> Probe:
    """Load the plugin in a fresh interpreter as the engine does, and ask it what it hooked. The engine is imported, not started."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE, engine.group], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Probe(f"loading the plugin took more than {timeout_s:.0f} s")
    return read_probe(done.returncode, done.stdout, done.stderr)


def read_probe(code: int, out: str, err: str) -> Probe:
    """A child's output as a :class:`Probe`: engines log to both streams, so only the marked line counts."""
    for line in out.splitlines():
        if line.startswith(_MARK):
            hooked, declined = json.loads(line.removeprefix(_MARK))
            return Probe(None, tuple(hooked), tuple(Reason(*reason) for reason in declined))
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "no output")
    return Probe(f"loading the plugin failed with exit code {code}: {last.strip()[:300]}")
