"""Installing into SGLang and out of it again: by hand, through SGLang's own loader, beside its HookRegistry, and into one that has changed."""

import functools
import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.layers.attention import flashattention_backend, triton_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import flashmap.adapters.sglang as adapter
from flashmap.adapters import install
from flashmap.core import stats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULES = [module for module, _, _ in adapter.BACKENDS.values()]


def state():
    """All that we may touch, by identity."""
    holders = (triton_backend.TritonAttnBackend, flashattention_backend.FlashAttentionBackend, flashattention_backend)
    return [{name: id(value) for name, value in vars(holder).items()} for holder in holders], list(sys.meta_path), dict(os.environ)


def targets(installation):
    return [hook.target.rpartition(":")[2] for hook in installation.hooked]


def test_hooks_both_backends_and_restores_them():
    before = state()
    installation = install("sglang")
    assert targets(installation) == [
        "TritonAttnBackend.forward_extend", "TritonAttnBackend.forward_decode", "TritonAttnBackend.init_cuda_graph_state",
        "FlashAttentionBackend.forward_extend", "FlashAttentionBackend.init_cuda_graph_state", "flash_attn_with_kvcache",
        "merge_state_v2_wrapper", "FlashAttentionBackend.init_forward_metadata", "FlashAttentionBackend.init_forward_metadata_in_graph",
    ]  # fmt: skip
    assert installation.declined == () and state() != before
    installation.remove()
    assert state() == before
    installation.remove()  # a second time does nothing
    assert state() == before


def test_installing_again_changes_nothing():
    first = install("sglang")
    after = state()
    assert install("sglang") is first
    adapter.register()
    assert install("sglang") is first and state() == after


def test_one_backend_one_mode_and_the_processes_that_sglang_starts_do_the_same(monkeypatch):
    before = state()
    installation = install("sglang", backends=["fa3"], modes=("draft_extend_v2",))
    assert all("triton_backend" not in hook.target for hook in installation.hooked)
    assert not any("init_forward_metadata" in target for target in targets(installation)), "a chain needs no tree"
    assert os.environ["FLASHMAP_SGLANG_BACKENDS"] == "fa3" and os.environ["FLASHMAP_SGLANG_MODES"] == "draft_extend_v2"
    installation.remove()
    assert state() == before
    monkeypatch.setenv("FLASHMAP_SGLANG_BACKENDS", "triton")
    monkeypatch.setenv("FLASHMAP_SGLANG_MODES", "draft_decode,target_verify")
    mine = install("sglang")
    assert targets(mine)[:2] == ["TritonAttnBackend.forward_extend", "TritonAttnBackend.forward_decode"]
    mine.remove()
    monkeypatch.setenv("FLASHMAP_SGLANG_MODES", "draft_decode")
    assert targets(install("sglang", backends=["triton", "fa3"]))[:2] == [
        "TritonAttnBackend.forward_decode",
        "TritonAttnBackend.init_cuda_graph_state",
    ]


def test_a_backend_that_has_nothing_of_what_was_asked_for(caplog):
    with caplog.at_level(logging.INFO, logger="flashmap"):
        installation = install("sglang", backends=["fa3"], modes=["draft_decode"])
        install("sglang", backends=["fa3"], modes=["draft_decode"])
    (reason,) = installation.declined
    assert reason.code == "mode" and "fa3 has nothing of draft_decode" in reason.text and "draft_extend_v2" in reason.fix
    assert caplog.text.count("fa3 has nothing") == 1 and not any("Flash" in target for target in targets(installation))


@pytest.mark.parametrize(
    "options, known", [({"backends": ["flashmla"]}, "triton, fa3"), ({"modes": ["decode"]}, "target_verify, draft_extend_v2, draft_decode")]
)
def test_names_that_do_not_exist(options, known):
    with pytest.raises(ValueError, match=known):
        install("sglang", **options)


@pytest.mark.parametrize(
    "holder, name, where",
    [
        (triton_backend.TritonAttnBackend, "forward_extend", "TritonAttnBackend.forward_extend is missing"),
        (triton_backend.TritonAttnBackend, "forward_decode", "TritonAttnBackend.forward_decode is missing"),
        (triton_backend.TritonAttnBackend, "init_cuda_graph_state", "TritonAttnBackend.init_cuda_graph_state is missing"),
        (flashattention_backend, "merge_state_v2_wrapper", "merge_state_v2_wrapper is missing"),
        (flashattention_backend, "flash_attn_with_kvcache", "flash_attn_with_kvcache is missing"),
    ],
)
def test_a_renamed_symbol_leaves_that_backend_alone_with_one_warning(monkeypatch, caplog, holder, name, where):
    monkeypatch.setattr(holder, f"{name}_renamed", getattr(holder, name), raising=False)
    monkeypatch.delattr(holder, name)
    if isinstance(holder, type):
        monkeypatch.delattr(holder.__mro__[1], name, raising=False)
    before = state()
    with caplog.at_level(logging.INFO, logger="flashmap"):
        installation = install("sglang")
        install("sglang")
    (reason,) = installation.declined
    assert reason.code == "contract" and where in reason.text
    other = "FlashAttentionBackend" if isinstance(holder, type) else "TritonAttnBackend"
    assert any(other in target for target in targets(installation))
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and where in warnings[0].getMessage()
    installation.remove()
    assert state() == before


def test_a_renamed_attribute_of_an_instance(monkeypatch, caplog):
    """What is set in ``__init__`` is no attribute of the class: the code of it is asked."""
    init = triton_backend.TritonAttnBackend.__init__
    code = init.__code__
    renamed = code.replace(co_names=tuple("extend_fwd" if n == "extend_attention_fwd" else n for n in code.co_names))
    monkeypatch.setattr(init, "__code__", renamed)
    (reason,) = install("sglang").declined
    assert "__init__ no longer uses 'extend_attention_fwd'" in reason.text and "extend_attention_fwd" in caplog.text


def test_a_renamed_parameter(monkeypatch):
    from sglang.kernels.ops.attention import extend_attention

    monkeypatch.setattr(extend_attention, "extend_attention_fwd", lambda q_extend, k_extend: None)
    (reason,) = install("sglang").declined
    assert "takes no 'kv_indices'" in reason.text


def test_parameters_in_another_order(monkeypatch):
    """Both kernels are called by position."""
    from sglang.kernels.ops.attention import decode_attention

    kernel = decode_attention.decode_attention_fwd
    parameters = list(inspect.signature(kernel).parameters.values())
    first, second, *rest = parameters
    moved = functools.wraps(kernel)(lambda *args, **kwargs: None)
    moved.__signature__ = inspect.Signature([second, first, *rest])
    monkeypatch.setattr(decode_attention, "decode_attention_fwd", moved)
    (reason,) = install("sglang").declined
    assert "decode_attention_fwd takes its parameters in another order" in reason.text


def test_a_broken_contract_under_strict_is_an_error(monkeypatch):
    monkeypatch.setenv("FLASHMAP_STRICT", "1")
    monkeypatch.delattr(flashattention_backend, "merge_state_v2_wrapper")
    with pytest.raises(RuntimeError, match="merge_state_v2_wrapper is missing"):
        adapter.register()


def test_our_own_mistake_never_reaches_the_server(monkeypatch, caplog):
    from flashmap.adapters.sglang import triton_attn

    monkeypatch.setattr(triton_attn, "hook", lambda modes: 1 / 0)
    adapter.register()
    assert "ZeroDivisionError" in caplog.text and [r.code for r in adapter._current().declined] == ["contract"]


@pytest.mark.parametrize(
    "name, value", [("FLASHMAP_IMPL", "torch_dens"), ("FLASHMAP_CHECK", "perhaps"), ("FLASHMAP_SGLANG_MODES", "prefill")]
)
def test_a_bad_variable_never_stops_the_server(monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    before = state()
    adapter.register()
    assert state() == before and value in caplog.text


def test_disabled(monkeypatch, caplog):
    monkeypatch.setenv("FLASHMAP_DISABLE", "1")
    before = state()
    with caplog.at_level(logging.INFO, logger="flashmap"):
        adapter.register()
    assert [r.code for r in install("sglang").declined] == ["disabled"]
    assert state() == before and caplog.records == []


def test_what_somebody_wrapped_around_ours_stays():
    installation = install("sglang")
    ours = triton_backend.TritonAttnBackend.forward_extend

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    triton_backend.TritonAttnBackend.forward_extend = theirs
    try:
        installation.remove()
        assert triton_backend.TritonAttnBackend.forward_extend is theirs
        mode = type("Mode", (), {"is_target_verify": lambda self: 1 / 0})()
        with pytest.raises(AttributeError):  # straight to SGLang's, which wants more of a batch than its mode
            theirs(None, None, None, None, None, type("Batch", (), {"forward_mode": mode})())
    finally:
        triton_backend.TritonAttnBackend.forward_extend = ours.__wrapped__


def test_installing_counts_nothing():
    install("sglang")
    assert stats.snapshot() == {}


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_beside_a_hook_of_sglangs_registry(first, monkeypatch):
    """Another plugin's AROUND on the same method: both are called, whoever came first."""
    from rig import Rig

    monkeypatch.setenv("FLASHMAP_IMPL", "torch_dense")
    original, seen = triton_backend.TritonAttnBackend.forward_extend, []

    def theirs(run, self, *args, **kwargs):
        seen.append(type(self).__name__)
        return run(self, *args, **kwargs)

    def apply():
        HookRegistry.register(f"{triton_backend.__name__}.TritonAttnBackend.forward_extend", theirs, HookType.AROUND)
        HookRegistry.apply_hooks()

    try:
        for step in (install, apply) if first == "ours" else (apply, install):
            step(*(("sglang",) if step is install else ()))
        rig = Rig("triton")
        rig.forward(rig.verify())
        assert seen == ["TritonAttnBackend"] and stats.snapshot()["torch_dense", "routed", ""] == 1
    finally:
        HookRegistry.reset()
        adapter._forget()
        triton_backend.TritonAttnBackend.forward_extend = original


# -- in processes of their own ------------------------------------------------------------------------------------------


@pytest.fixture
def run_python(tmp_path):
    """A function: runs code in a fresh interpreter that sees the stubs and our entry point, gives its last line as JSON and its log."""
    info = tmp_path / "flashmap_verify-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashmap-verify\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nflashmap_verify = flashmap.adapters.sglang:register\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHMAP_", "SGLANG_"))}
    path = os.pathsep.join(map(str, (HERE / "stubs", tmp_path, ROOT)))

    def run(code, **variables):
        environ = {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


_LOAD = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from sglang.srt.plugins import load_plugins
load_plugins()
load_plugins()
import flashmap.adapters.sglang as ours
modules = [m for m, _, _ in ours.BACKENDS.values()]
early = [m in sys.modules for m in modules]
finders = len(sys.meta_path)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
wrapped = hasattr(TritonAttnBackend.forward_extend, "__wrapped__")
loader = type(sys.modules[modules[0]].__loader__).__name__, vars(sys.modules[modules[0]].__loader__).keys() & {"exec_module"}
ours.install().remove()
print(json.dumps([early, wrapped, hasattr(TritonAttnBackend.forward_extend, "__wrapped__"), loader[0], len(loader[1]), finders - len(sys.meta_path)]))
"""


def test_through_sglangs_loader_nothing_is_imported_before_sglang_does(run_python):
    (early, wrapped, after, loader, left_over, finders), log = run_python(_LOAD)
    assert early == [False, False], "a process without attention loads neither backend"
    assert wrapped and not after and finders == 2
    assert (loader, left_over) == ("SourceFileLoader", 0)
    assert log.count("flashmap is active in SGLang's triton backend") == 1 and "target verify, draft extend" in log


def test_off_by_a_variable(run_python):
    (_, wrapped, *_), log = run_python(_LOAD, FLASHMAP_DISABLE="1")
    assert not wrapped and "flashmap is active" not in log


def test_doctor_says_what_is_hooked(run_python):
    code = "import json\nfrom flashmap.core.diagnostics import examine\nprint(json.dumps([[f.subject, f.verdict, f.code, f.text] for f in examine().findings]))"
    found, _ = run_python(code)
    ours = {(verdict, code): text for subject, verdict, code, text in found if subject == "sglang"}
    assert ours["ok", "active"] == "would run with FlashMap (9 hooked)"
    assert "flashmap.adapters.sglang:register is visible in sglang.srt.plugins" in ours["ok", "entry_point"]
