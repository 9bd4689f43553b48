"""The FLASHMAP_* variables: defaults, what each accepts, and errors that name the variable and what is accepted."""

from __future__ import annotations

import logging
import re

import pytest

from flashmap import env

GOOD = {
    "FLASHMAP_DISABLE": [
        ("1", True),
        ("TRUE", True),
        ("yes", True),
        (" on ", True),
        ("0", False),
        ("no", False),
        ("off", False),
        ("", False),
    ],
    "FLASHMAP_STRICT": [("1", True), ("false", False)],
    "FLASHMAP_IMPL": [("torch_dense", "torch_dense"), (" reference ", "reference"), ("", None)],
    "FLASHMAP_LOG": [("DEBUG", "debug"), ("warning", "warning"), ("off", "off")],
    "FLASHMAP_SPLITKV_WAVES": [("2", 2)],
    "FLASHMAP_SPLITKV_MAX_SPLITS": [("128", 128)],
    "FLASHMAP_SPLITKV_MIN_CHUNK": [("1", 1)],
    "FLASHMAP_SPLITKV_BLOCK_N": [("64", 64)],
    "FLASHMAP_SPLITKV_WARPS": [("8", 8)],
    "FLASHMAP_SPLITKV_STAGES": [("3", 3)],
    "FLASHMAP_SPLITKV_LAST_MERGES": [("1", True), ("off", False)],
}
BAD = {
    "FLASHMAP_DISABLE": ["maybe", "2"],
    "FLASHMAP_STRICT": ["strict"],
    "FLASHMAP_LOG": ["loud", "10"],
    "FLASHMAP_SPLITKV_WAVES": ["0", "-1", "two", "1.5", ""],
    "FLASHMAP_SPLITKV_MAX_SPLITS": ["0"],
    "FLASHMAP_SPLITKV_MIN_CHUNK": ["none"],
    "FLASHMAP_SPLITKV_BLOCK_N": ["8", "48", "x"],
    "FLASHMAP_SPLITKV_WARPS": ["3", "32"],
    "FLASHMAP_SPLITKV_STAGES": ["0"],
    "FLASHMAP_SPLITKV_LAST_MERGES": ["2"],
}


@pytest.mark.parametrize(("name", "text", "value"), [(name, *pair) for name, pairs in GOOD.items() for pair in pairs])
def test_accepted(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert env.get(name) == value


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=re.escape(f"{name}={text!r}")) as error:
        env.get(name)
    assert env.VARIABLES[name].accepts in str(error.value)


@pytest.mark.parametrize("name", env.VARIABLES)
def test_unset_is_the_default(name: str) -> None:
    assert env.get(name) == env.VARIABLES[name].default
    assert env.VARIABLES[name].name == name and env.VARIABLES[name].doc


def test_read_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.get("FLASHMAP_DISABLE") is False
    monkeypatch.setenv("FLASHMAP_DISABLE", "1")
    assert env.get("FLASHMAP_DISABLE") is True


def test_the_logger_gets_its_level_when_a_plugin_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("flashmap")
    before = logger.level
    try:
        env.configure_logging()
        assert logger.level == before
        monkeypatch.setenv("FLASHMAP_LOG", "error")
        env.configure_logging()
        assert logger.level == logging.ERROR
        monkeypatch.setenv("FLASHMAP_LOG", "off")
        env.configure_logging()
        assert not logger.isEnabledFor(logging.CRITICAL)
    finally:
        logger.setLevel(before)
