"""Every ``FLASHMAP_*`` variable: its name, its type, its default and one line on what it does.

Variables are read when they are needed, never at import. A bad value raises ValueError, naming the variable
and what it accepts. This file imports neither torch nor an engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_LEVELS = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: ``parse`` turns its text into a value or raises ValueError."""

    name: str
    parse: Callable[[str], Any]
    accepts: str
    default: Any
    doc: str


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _level(text: str) -> str:
    lowered = text.strip().lower()
    if lowered not in _LEVELS:
        raise ValueError(text)
    return lowered


def _name(text: str) -> str | None:
    return text.strip() or None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _power_of_two(text: str) -> int:
    value = _positive(text)
    if value < 16 or value & (value - 1):
        raise ValueError(text)
    return value


def _warps(text: str) -> int:
    value = int(text)
    if value not in (1, 2, 4, 8, 16):
        raise ValueError(text)
    return value


def _names(text: str) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in text.split(",") if name.strip()) or None


_FLAG = "1/true/yes/on or 0/false/no/off"
VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("FLASHMAP_DISABLE", _flag, _FLAG, False, "1: the plugins hook nothing; engines run as without FlashMap"),
        Variable("FLASHMAP_IMPL", _name, "the name of a registered implementation", None, "use this implementation where none is named"),
        Variable(
            "FLASHMAP_TABLE",
            _name,
            "a file that `flashmap bench --tune` wrote",
            None,
            "choose by this table of measured times; unset: the user's own for this GPU, else the checked-in one",
        ),
        Variable("FLASHMAP_STRICT", _flag, _FLAG, False, "1: losing the fast path is an error, not a warning"),
        Variable("FLASHMAP_LOG", _level, ", ".join(_LEVELS), None, "level of the `flashmap` logger, set when a plugin installs"),
        Variable(
            "FLASHMAP_CHECK", _flag, _FLAG, False, "debugging: also run the engine's own kernel for each routed call, record the difference"
        ),
        Variable("FLASHMAP_STATS_DIR", _name, "a directory", None, "debugging: every engine process writes its counters there, as JSON"),
        Variable(
            "FLASHMAP_VLLM_BACKENDS",
            _names,
            "backend names, separated by commas",
            None,
            "vLLM backends to hook; unset: all that the platform has",
        ),
        Variable("FLASHMAP_SGLANG_BACKENDS", _names, "triton and fa3, separated by commas", None, "SGLang backends to hook; unset: both"),
        Variable(
            "FLASHMAP_SGLANG_MODES",
            _names,
            "target_verify, draft_extend_v2 and draft_decode, separated by commas",
            None,
            "what of SGLang to serve; unset: all three",
        ),
        Variable(
            "FLASHMAP_SGLANG_QLEN_MASK",
            _flag,
            _FLAG,
            False,
            "1: SGLang's triton backend keeps the tree masks alone, without a column for each cached key",
        ),
        Variable(
            "FLASHMAP_FA3_FINITE_PAGES",
            _flag,
            _FLAG,
            False,
            "1: a promise that cache rows which no request lists hold finite numbers; fa3 and fa3_tail may then copy whole pages",
        ),
        Variable("FLASHMAP_SPLITKV_WAVES", _positive, "an integer >= 1", None, "triton_splitkv: programs per SM to aim for"),
        Variable("FLASHMAP_SPLITKV_MAX_SPLITS", _positive, "an integer >= 1", None, "triton_splitkv: most splits of one request's prefix"),
        Variable("FLASHMAP_SPLITKV_MIN_CHUNK", _positive, "an integer >= 1", None, "triton_splitkv: fewest keys in a split"),
        Variable("FLASHMAP_SPLITKV_BLOCK_N", _power_of_two, "a power of two >= 16", None, "triton_splitkv: keys in a tile"),
        Variable("FLASHMAP_SPLITKV_WARPS", _warps, "1, 2, 4, 8 or 16", None, "triton_splitkv: warps of a program"),
        Variable("FLASHMAP_SPLITKV_STAGES", _positive, "an integer >= 1", None, "triton_splitkv: software pipeline stages"),
        Variable(
            "FLASHMAP_SPLITKV_LAST_MERGES",
            _flag,
            _FLAG,
            None,
            "triton_splitkv: 1: the last program of a request merges, and no second kernel",
        ),
        Variable("FLASHMAP_PEERS", _name, "a folder", None, "`flashmap bench`: look for peers here too (benchmarks/pack_peers.py)"),
        Variable("FLASHMAP_COMMIT", _name, "a commit", None, "`flashmap bench`: what results say of a checkout without .git"),
    )
}


def get(name: str) -> Any:
    """The value of a variable, or its default. Raises ValueError for a value it does not accept."""
    variable = VARIABLES[name]
    text = os.environ.get(name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not understood: set it to {variable.accepts}, or unset it") from None


def configure_logging() -> None:
    """Apply FLASHMAP_LOG to the ``flashmap`` logger. Called by plugins and the command line, never at import."""
    level = get("FLASHMAP_LOG")
    if level is not None:
        logging.getLogger("flashmap").setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
