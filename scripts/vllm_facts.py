"""What the vLLM adapter's contracts can be checked against, without installing that vLLM: names and parameters, read from a wheel.

    python scripts/vllm_facts.py WHEEL_OR_FOLDER...     writes tests/vllm/facts/vllm-VERSION.json for each

``pip download --no-deps vllm==0.33.0`` gives a wheel; a folder has ``vllm/`` in it. Nothing is imported: the sources are parsed. Of each
module in a contract, and of those that its classes derive from: functions with their parameters and the names that their code refers to
(only those that a contract asks for), classes with their bases, fields, methods and attributes.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashmap.adapters.vllm.contracts import COMMON, CONTRACTS  # noqa: E402

WANTED = (*COMMON, *(contract for contracts in CONTRACTS.values() for contract in contracts))


class Source:
    """The Python files of a wheel or a folder."""

    def __init__(self, place: Path) -> None:
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        self._folder = place
        names = self._wheel.namelist() if self._wheel else [p.name + "/" for p in place.glob("vllm*-*.dist-info")]
        found = [m for m in (re.match(r"vllm(?:_cpu)?-([^/]+)\.dist-info/", name) for name in names) if m]
        self.version = found[0].group(1).split("+")[0]

    def read(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if self._wheel is not None and name in self._wheel.namelist():
                return ast.parse(self._wheel.read(name))
            if self._wheel is None and (self._folder / name).exists():
                return ast.parse((self._folder / name).read_text())
        return None


def names_in(node: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def parameters(node: ast.FunctionDef) -> list[str]:
    a = node.args
    return [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + (["**"] if a.kwarg else [])


def function(node: ast.FunctionDef, asked: set[str]) -> dict[str, list[str]]:
    return {"parameters": parameters(node), "uses": sorted(names_in(node) & asked)}


def facts(source: Source) -> dict[str, dict[str, dict[str, object]]]:
    """{module: {name: what it is}} of all that the contracts name."""
    queue, names = [], set()
    for contract in WANTED:
        module, _, path = contract.target.partition(":")
        queue.append(f"{module}:{path.split('.')[0]}")
        names |= {*contract.uses, *contract.fields, *path.split(".")[1:]}
    found: dict[str, dict[str, dict[str, object]]] = {}
    while queue:
        key = queue.pop()
        module, _, name = key.partition(":")
        tree = source.read(module)
        if tree is None or name in found.get(module, {}):
            continue
        imports = {
            a.asname or a.name: (n.module, a.name) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module for a in n.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                found.setdefault(module, {})[name] = function(node, names)
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [
                    b.value.id if isinstance(b, ast.Subscript) and isinstance(b.value, ast.Name) else getattr(b, "id", "")
                    for b in node.bases
                ]
                qualified = []
                for base in bases:
                    where, real = imports.get(base, (module, base))
                    if where.startswith("vllm"):
                        qualified.append(f"{where}:{real}")
                        queue.append(f"{where}:{real}")
                entry: dict[str, object] = {"bases": qualified, "members": {}}
                members: dict[str, object] = {}
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name in names:
                        members[item.name] = function(item, names)
                    for target in (
                        [item.target] if isinstance(item, ast.AnnAssign) else item.targets if isinstance(item, ast.Assign) else []
                    ):
                        if isinstance(target, ast.Name) and target.id in names:
                            members[target.id] = {"field": isinstance(item, ast.AnnAssign)}
                entry["members"] = members
                found.setdefault(module, {})[name] = entry
    return {module: dict(sorted(names.items())) for module, names in sorted(found.items())}


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for place in sys.argv[1:]:
        source = Source(Path(place))
        out = ROOT / "tests" / "vllm" / "facts" / f"vllm-{source.version}.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps({"version": source.version, "modules": facts(source)}, separators=(",", ":"), sort_keys=True) + "\n")
        print(f"{out.relative_to(ROOT)}: {out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
