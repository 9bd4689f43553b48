"""The vLLM adapter's contracts against the sources of versions that are not installed here: facts that scripts/vllm_facts.py read from their wheels."""

import copy
import json
from pathlib import Path

import pytest

from flashmap.adapters.patching import Contract
from flashmap.adapters.vllm.contracts import COMMON, CONTRACTS

FACTS = {
    path.stem: json.loads(path.read_text())["modules"] for path in sorted((Path(__file__).parents[1] / "vllm" / "facts").glob("*.json"))
}
CPU_MLA_SINCE = "vllm-0.32.0"


def find(facts, module, path):
    """What ``module:path`` is, also where a class has it from its bases; None."""
    first, *rest = path.split(".")
    found = facts.get(module, {}).get(first)
    if found is None or not rest:
        return found
    if rest[0] in found.get("members", {}):
        return found["members"][rest[0]]
    for base in found.get("bases", ()):
        inherited = (
            find(facts, *base.split(":"), *rest) if False else find(facts, base.split(":")[0], f"{base.split(':')[1]}.{'.'.join(rest)}")
        )
        if inherited is not None:
            return inherited
    return None


def missing(facts, contract: Contract) -> list[str]:
    module, _, path = contract.target.partition(":")
    found = find(facts, module, path)
    if found is None:
        return [f"{contract.target} is missing"]
    parameters = found.get("parameters", ())
    return [
        *(f"{contract.target} takes no {p!r}" for p in contract.parameters if p not in parameters and "**" not in parameters),
        *(f"{contract.target} has no field {f!r}" for f in contract.fields if not (find(facts, module, f"{path}.{f}") or {}).get("field")),
        *(f"{contract.target} no longer uses {n!r}" for n in contract.uses if n not in found.get("uses", ())),
    ]


def all_missing(facts, backend):
    return [phrase for contract in (*COMMON, *CONTRACTS[backend]) for phrase in missing(facts, contract)]


def test_the_versions():
    assert set(FACTS) == {"vllm-0.26.0", "vllm-0.32.0", "vllm-0.33.0"}


@pytest.mark.parametrize("backend", CONTRACTS)
@pytest.mark.parametrize("version", FACTS)
def test_contracts_hold(version, backend):
    if backend == "CPU_MLA" and version < CPU_MLA_SINCE:
        assert any("CPU_MLA is missing" in phrase for phrase in all_missing(FACTS[version], backend)), "it has none"
    else:
        assert all_missing(FACTS[version], backend) == []


@pytest.mark.parametrize("version", FACTS)
def test_what_a_version_renames_would_be_seen(version):
    """Each name in turn that the contracts of TRITON_MLA rest on."""
    for contract in CONTRACTS["TRITON_MLA"]:
        module, _, path = contract.target.partition(":")
        facts = copy.deepcopy(FACTS[version])
        head, _, member = path.partition(".")
        for classes in facts.values() if member else ():
            for entry in classes.values():
                entry.get("members", {}).pop(member, None)
        if not member:
            facts[module].pop(head)
        assert contract.target in "".join(all_missing(facts, "TRITON_MLA")), contract.target


def test_a_renamed_parameter_attribute_or_field_is_named():
    facts = FACTS["vllm-0.33.0"]
    forward = "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward"
    assert missing(facts, Contract(forward, ("query", "kv_pool"))) == [f"{forward} takes no 'kv_pool'"]
    assert missing(facts, Contract(forward, uses=("_kv_scale",))) == [f"{forward} no longer uses '_kv_scale'"]
    metadata = "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata"
    assert missing(facts, Contract(metadata, fields=("seq_lens", "lens"))) == [f"{metadata} has no field 'lens'"]
