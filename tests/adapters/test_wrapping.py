"""Patches of an engine: made, undone, stacked; and hooks that wait for an import."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from flashmap.adapters.patching import Contract, probe, set_for_children, when_imported, wrap


class Base:
    def forward(self, x):
        return x


class Derived(Base):
    pass


HERE = __name__


def double(original, self, x):
    return 2 * original(self, x)


def test_wrap_and_undo():
    before = dict(vars(Base))
    hook = wrap(f"{HERE}:Base.forward", double, "a test")
    assert Base().forward(3) == Derived().forward(3) == 6
    assert Base.forward.__name__ == "forward" and str(hook) == f"{HERE}:Base.forward -> {HERE}.double"
    hook.undo()
    hook.undo()
    assert Base().forward(3) == 3 and dict(vars(Base)) == before


def test_an_inherited_function_is_inherited_again():
    hook = wrap(f"{HERE}:Derived.forward", functools.partial(lambda times, original, self, x: times * original(self, x), 3), "a test")
    assert Derived().forward(1) == 3 and Base().forward(1) == 1
    hook.undo()
    assert "forward" not in vars(Derived)


def test_a_later_wrapper_stays_and_ours_below_it_does_nothing():
    original = Base.forward
    hook = wrap(f"{HERE}:Base.forward", double, "a test")
    ours = Base.forward
    Base.forward = theirs = lambda self, x: ours(self, x) + 1
    try:
        assert Base().forward(3) == 7
        hook.undo()
        assert Base.forward is theirs and Base().forward(3) == 4
    finally:
        Base.forward = original


def test_a_module_is_hooked_when_somebody_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "an_engine").mkdir()
    (tmp_path / "an_engine" / "__init__.py").write_text("")
    (tmp_path / "an_engine" / "backend.py").write_text("def run():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, hooks = list(sys.meta_path), []
    hook = when_imported(
        "an_engine.backend", lambda: hooks.append(wrap("an_engine.backend:run", lambda original: -original(), "a test")), "a test"
    )
    import an_engine  # type: ignore[import-not-found]

    assert not hooks and "an_engine.backend" not in sys.modules
    backend = importlib.import_module("an_engine.backend")
    assert backend.run() == -1 and len(hooks) == 1 and sys.meta_path == finders
    assert "exec_module" not in vars(backend.__loader__)
    hooks[0].undo()
    hook.undo()
    assert importlib.reload(backend).run() == 1 and len(hooks) == 1
    for name in ("an_engine.backend", "an_engine"):
        del sys.modules[name]
    later = when_imported("an_engine.backend", lambda: hooks.append(None), "a test")  # type: ignore[arg-type]
    later.undo()
    assert importlib.import_module("an_engine.backend").run() == 1 and len(hooks) == 1 and an_engine


def test_a_module_that_does_not_exist_is_none_as_before():
    hook = when_imported("no_such_engine", lambda: None, "a test")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_engine")
    hook.undo()


def test_what_a_body_uses(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("a_module")
    exec("def f(self):\n    self.kernel = 1\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "a_module", module)
    assert probe([Contract("a_module:f", uses=("kernel",))]) == ()
    assert probe([Contract("a_module:f", uses=("kernels",))]) == ("a_module:f no longer uses 'kernels'",)


def test_a_variable_for_children(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHMAP_TEST", "before")
    hook = set_for_children("FLASHMAP_TEST", ("a", "b"))
    assert os.environ["FLASHMAP_TEST"] == "a,b"
    hook.undo()
    assert os.environ["FLASHMAP_TEST"] == "before"
