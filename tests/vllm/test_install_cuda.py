"""Installing where vLLM's platform is CUDA: paths that import nothing until vLLM asks for a backend. No GPU: the platform is said to be one."""

import logging
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from rig import patch, theirs_triton
from vllm.config.attention import AttentionConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import flashmap.adapters.vllm as adapter
from flashmap.adapters import install
from flashmap.adapters.vllm import gate

NAMES = ["TRITON_ATTN", "FLASH_ATTN", "TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA"]
NEW = {"FLASHMAP": "TRITON_ATTN", "FLASHMAP_MLA": "TRITON_MLA"}


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.delenv("FLASHMAP_VLLM_BACKENDS", raising=False)
    if adapter._installation is not None:
        adapter._installation.remove()
    adapter._forget()
    monkeypatch.setattr(adapter, "_platform", lambda: "cuda")
    patch(monkeypatch)
    yield
    if adapter._installation is not None:
        adapter._installation.remove()
    for name in NAMES:
        AttentionBackendEnum[name].clear_override()


def classes():
    return {name: AttentionBackendEnum[name].get_class() for name in NAMES}


def test_hooks_all_five_and_removes_them():
    untouched = classes()
    installation = install("vllm")
    assert [hook.target for hook in installation.hooked] == [f"vLLM backend {name}" for name in (*NAMES, *NEW)]
    assert installation.declined == ()
    assert install("vllm") is installation
    for name, ours in classes().items():
        assert issubclass(ours, untouched[name]) and ours is not untouched[name]
        assert ours.get_name() == name, "vLLM looks its name up"
        assert ours.__module__.startswith("flashmap.") and getattr(sys.modules[ours.__module__], ours.__qualname__) is ours, (
            "vLLM imports it by path"
        )
        assert issubclass(ours.get_impl_cls(), untouched[name].get_impl_cls()) and issubclass(
            ours.get_builder_cls(), untouched[name].get_builder_cls()
        )
        ours_only = set(vars(ours)) - {
            "__module__",
            "__doc__",
            "__abstractmethods__",
            "_abc_impl",
            "__firstlineno__",
            "__static_attributes__",
        }
        assert ours_only == {"get_impl_cls", "get_builder_cls"}, "layouts and validation are vLLM's"
    installation.remove()
    assert classes() == untouched
    installation.remove()
    assert classes() == untouched


def test_names_of_our_own_leave_vllms_backends_alone():
    """A user who wants nothing overridden chooses them: ``--attention-backend FLASHMAP``."""
    untouched = classes()
    installation = install("vllm", backends=list(NEW))
    assert classes() == untouched
    for name, base in NEW.items():
        chosen = pickle.loads(pickle.dumps(AttentionConfig(backend=name.lower()))).backend  # as it reaches a worker
        ours = chosen.get_class()
        assert chosen is AttentionBackendEnum[name] and issubclass(ours, untouched[base]) and ours is not untouched[base]
        assert ours.get_name() == base, "what vLLM knows by its name holds"
    installation.remove()
    assert not NEW.keys() & AttentionBackendEnum.__members__.keys()
    with pytest.raises(ValueError, match="FLASHMAP"):
        AttentionConfig(backend="FLASHMAP")
    assert len(install("vllm", backends=["FLASHMAP"]).hooked) == 2, "and the choice for child processes"


def test_where_vllm_takes_no_new_names(monkeypatch):
    monkeypatch.delattr(AttentionBackendEnum, "register")
    assert [hook.target for hook in install("vllm").hooked] == [f"vLLM backend {name}" for name in NAMES]
    (reason,) = install("vllm", backends=["FLASHMAP"]).declined
    assert reason.code == "platform" and "TRITON_ATTN" in reason.fix


def test_registering_imports_no_backend():
    """vLLM loads plugins in processes that run no attention."""
    code = (
        "import sys, vllm.plugins, flashmap.adapters.vllm as adapter\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "adapter._platform = lambda: 'cuda'\n"
        "before = set(sys.modules)\n"
        "adapter.register()\n"
        "assert AttentionBackendEnum.FLASH_ATTN.get_path() == 'flashmap.adapters.vllm.gate.FLASH_ATTN'\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_selection_of_vllms_cuda_platform_follows():
    """As platforms/cuda.py does: the class of the registry, validated, by its path."""
    install("vllm")
    found = AttentionBackendEnum.TRITON_ATTN.get_class()
    assert f"{found.__module__}.{found.__qualname__}" == "flashmap.adapters.vllm.triton_attn.FlashMapTritonAttentionBackend"
    assert found.supports_head_size(128) and found.supports_sink()


def test_a_broken_contract_leaves_that_backend_alone_with_one_warning(monkeypatch, caplog):
    untouched = classes()
    monkeypatch.setattr(theirs_triton.TritonAttentionImpl, "forward_renamed", theirs_triton.TritonAttentionImpl.forward, raising=False)
    monkeypatch.delattr(theirs_triton.TritonAttentionImpl, "forward")
    monkeypatch.delattr(theirs_triton.TritonAttentionImpl.__mro__[1], "forward")
    install("vllm")
    with caplog.at_level(logging.INFO, logger="flashmap"):
        assert AttentionBackendEnum.TRITON_ATTN.get_class() is untouched["TRITON_ATTN"]
        assert AttentionBackendEnum.TRITON_ATTN.get_class() is untouched["TRITON_ATTN"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "TritonAttentionImpl.forward is missing" in warning
    assert AttentionBackendEnum.TRITON_MLA.get_class() is not untouched["TRITON_MLA"]
    (reason,) = [r for r in adapter.examine().declined if r.text.startswith("TRITON_ATTN:")]
    assert reason.code == "contract"
    assert not {"vLLM backend TRITON_ATTN", "vLLM backend FLASHMAP"} & {hook.target for hook in adapter.examine().hooked}


def test_a_broken_contract_under_strict_is_an_error(monkeypatch):
    monkeypatch.setenv("FLASHMAP_STRICT", "1")
    monkeypatch.delattr(theirs_triton, "TritonAttentionMetadata")
    install("vllm")
    with pytest.raises(RuntimeError, match="TritonAttentionMetadata is missing"):
        AttentionBackendEnum.TRITON_ATTN.get_class()


def test_what_is_set_in_init_is_asked_for(monkeypatch):
    init = theirs_triton.TritonAttentionImpl.__init__
    renamed = init.__code__.replace(co_names=tuple("window" if n == "sliding_window" else n for n in init.__code__.co_names))
    monkeypatch.setattr(init, "__code__", renamed)
    install("vllm")
    assert AttentionBackendEnum.TRITON_ATTN.get_class() is theirs_triton.TritonAttentionBackend
    assert "no longer uses 'sliding_window'" in gate.declined["TRITON_ATTN"].text


def test_a_kernel_library_that_is_not_there_is_vllms_own_error(monkeypatch):
    """vLLM then goes on to its next backend."""
    module = "vllm.v1.attention.backends.flash_attn"
    monkeypatch.setitem(sys.modules, module, None)
    install("vllm")
    with pytest.raises(ImportError):
        AttentionBackendEnum.FLASH_ATTN.get_class()
    assert gate.declined == {}


def test_disabled(monkeypatch):
    monkeypatch.setenv("FLASHMAP_DISABLE", "1")
    assert [r.code for r in install("vllm").declined] == ["disabled"]
    assert not any(AttentionBackendEnum[name].is_overridden() for name in NAMES)


def test_names_and_platforms(monkeypatch):
    assert [r.code for r in install("vllm", backends=["CPU_ATTN"]).declined] == ["platform"]
    adapter._installation.remove()
    monkeypatch.setattr(adapter, "_platform", lambda: "xpu")
    assert install("vllm").hooked == ()
    assert [r.code for r in install("vllm", backends=["TRITON_ATTN"]).declined] == ["platform"]


def test_another_plugins_override_stays():
    register_backend(AttentionBackendEnum.FLASH_ATTN, "somebody.elses.Backend")
    installation = install("vllm")
    assert [r.code for r in installation.declined] == ["overridden"] and len(installation.hooked) == len(NAMES) - 1 + len(NEW)
    installation.remove()
    assert AttentionBackendEnum.FLASH_ATTN.get_path() == "somebody.elses.Backend"


def test_a_name_of_our_own_reaches_a_spawned_process():
    """vLLM's engine processes unpickle their configuration before they load a plugin."""
    install("vllm", backends=["FLASHMAP"])
    child = (
        "import pickle, sys\n"
        "chosen = pickle.load(sys.stdin.buffer).backend\n"
        "assert chosen.name == 'FLASHMAP' and chosen.get_path() == 'flashmap.adapters.vllm.gate.FLASHMAP'\n"
    )
    given = pickle.dumps(AttentionConfig(backend="FLASHMAP"))
    done = subprocess.run([sys.executable, "-c", child], input=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_somebody_elses_flashmap_stays():
    register_backend("FLASHMAP", "another.flashmap.Backend")
    try:
        installation = install("vllm", backends=["FLASHMAP"])
        assert [r.code for r in installation.declined] == ["overridden"] and "another.flashmap" in installation.declined[0].text
        installation.remove()
        assert AttentionBackendEnum["FLASHMAP"].get_path() == "another.flashmap.Backend"
    finally:
        adapter._forget_member("FLASHMAP")
