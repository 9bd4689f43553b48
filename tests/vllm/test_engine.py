"""Real vLLM engines on a CPU: speculative decoding with the plugin, without it, and without speculation.

Tokens are compared in fp32, where the engine's own paths agree to 1e-5 and no near-tie decides; the difference from the
engine's kernel is taken in both. Each engine costs 5 to 15 seconds, so every run serves several tests.
"""

import pytest

pytest.importorskip("vllm")

from flashmap.adapters import observe

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OFF = {"FLASHMAP_DISABLE": "1"}
DENSE = {"FLASHMAP_IMPL": "torch_dense", "FLASHMAP_CHECK": "1"}
ZEROS = {"name": "zeros", "env": {"FLASHMAP_IMPL": "zeros", "FLASHMAP_CHECK": "1"}}
AUTOMATIC = {"name": "automatic", "env": {"FLASHMAP_IMPL": None}}


def mtp(k):
    return {"method": "mtp", "num_speculative_tokens": k}


@pytest.fixture(scope="module")
def plan(model_dirs, tmp_path_factory):
    """The runs, by name. The name's first word is the target: runs of one target must give the same tokens."""
    stats = tmp_path_factory.mktemp("stats")

    def run(name, speculative, *, dtype="float32", env=None, phases=(), **more):
        model = {"llama": "llama", "llama8": "llama8", "deepseek": "deepseek_v3"}[name.split("-")[0]]
        backend = "CPU_MLA" if model == "deepseek_v3" else "CPU_ATTN"
        phases = [{"name": "main"}, *phases]
        return {"name": name, "model": model_dirs[model], "speculative": speculative, "dtype": dtype, "backend": backend, "env": env or {}, "phases": phases, **more}  # fmt: skip

    def apart(name):
        """The engine in a process of its own, whose counters come by files."""
        return DENSE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FLASHMAP_STATS_DIR": str(stats / name)}

    draft = {"method": "draft_model", "num_speculative_tokens": 3, "model": model_dirs["llama_draft"]}
    eagle = {"method": "eagle", "num_speculative_tokens": 3, "model": model_dirs["llama8_eagle"]}
    return [
        run("llama-plain", None, env=OFF),
        run("llama8-plain", None, env=OFF),
        run("deepseek-plain", None, env=OFF),
        run("llama-ngram-off", NGRAM, env=OFF),
        run("deepseek-mtp2-off", mtp(2), env=OFF),
        run("llama-ngram", NGRAM, env=DENSE, phases=[AUTOMATIC, ZEROS]),
        run("llama-draft", draft, env=DENSE),
        run("llama8-eagle", eagle, env=DENSE),
        run("deepseek-mtp1", mtp(1), env=DENSE),
        run("deepseek-mtp2", mtp(2), env=DENSE, phases=[ZEROS]),
        run("deepseek-mtp2-automatic", mtp(2)),
        run("llama-draft-bf16", draft, dtype="bfloat16", env=DENSE),
        run("llama8-eagle-bf16", eagle, dtype="bfloat16", env=DENSE),
        run("deepseek-mtp2-bf16", mtp(2), dtype="bfloat16", env=DENSE),
        run("llama-ngram-apart", NGRAM, env=apart("llama-ngram-apart")),
        run("deepseek-mtp2-apart", mtp(2), env=apart("deepseek-mtp2-apart")),
        run("llama-ngram-by-hand", NGRAM, env=DENSE | {"VLLM_PLUGINS": ""}, install=["CPU_ATTN"]),
    ]


@pytest.fixture(scope="module")
def results(run_engines, plan):
    found = run_engines(plan)
    for one in plan:
        found[one["name"]]["stats_dir"] = one["env"].get("FLASHMAP_STATS_DIR")
    return found


def tokens(results, name, phase="main"):
    return results[name]["phases"][phase]["tokens"]


def report(results, name, phase="main"):
    """Of this process, or of the engine's own where it had one."""
    if results[name]["stats_dir"]:
        return observe.collect(results[name]["stats_dir"])
    return observe.merge([results[name]["phases"][phase]["report"]])


def accepted(results, name):
    return results[name]["phases"]["main"]["metrics"]["vllm:spec_decode_num_accepted_tokens"]


ROUTED = ["llama-ngram", "llama-draft", "llama8-eagle", "deepseek-mtp1", "deepseek-mtp2"]
APART = ["llama-ngram-apart", "deepseek-mtp2-apart"]
BF16 = ["llama-draft-bf16", "llama8-eagle-bf16", "deepseek-mtp2-bf16"]
LAYERS = {"llama-ngram": 2, "llama-draft": 4, "llama8-eagle": 9, "deepseek-mtp1": 3, "deepseek-mtp2": 3}


@pytest.mark.parametrize("name", [*ROUTED, *APART, "llama-ngram-by-hand"])
def test_verify_batches_are_routed(results, name):
    found = report(results, name)
    assert found.counts.get(("torch_dense", "routed", ""), 0) > 0
    assert found.total("left", "engine_faster") == 0
    assert found.total("routed") == sum(layer.calls for layer in found.layers.values()), "each routed call was checked"


@pytest.mark.parametrize("name", ROUTED)
def test_every_layer_was_compared_with_vllms_kernel(results, name, record_property):
    found = report(results, name)
    assert len(found.layers) == LAYERS[name]
    record_property("largest", found.largest)
    for layer, differences in found.layers.items():
        assert differences.scale > 0.1, f"{layer}: attention this small shows nothing"
        assert differences.largest <= 1e-5, layer


@pytest.mark.parametrize("name", BF16)
def test_largest_difference_in_bf16(results, name, record_property):
    found = report(results, name)
    record_property("largest", found.largest)
    assert found.layers
    assert found.largest <= 1e-2, {layer: d.largest for layer, d in found.layers.items()}


@pytest.mark.parametrize(
    "name", [*ROUTED, *APART, "llama-ngram-by-hand", "llama-ngram-off", "deepseek-mtp2-off", "deepseek-mtp2-automatic"]
)
def test_tokens_are_those_without_speculation(results, name):
    assert tokens(results, name) == tokens(results, name.split("-")[0] + "-plain")


@pytest.mark.parametrize("name, off", [("llama-ngram", "llama-ngram-off"), ("deepseek-mtp2", "deepseek-mtp2-off")])
def test_drafts_are_accepted_as_without_the_plugin(results, name, off):
    assert accepted(results, name) == accepted(results, off)


@pytest.mark.parametrize("name", ["llama-draft", "llama8-eagle", "deepseek-mtp1", "deepseek-mtp2"])
def test_some_drafts_are_accepted_and_some_are_not(results, name):
    metrics = results[name]["phases"]["main"]["metrics"]
    assert 0 < accepted(results, name) < metrics["vllm:spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("name", ["llama-ngram", "deepseek-mtp2"])
def test_the_check_can_fail(results, name):
    """Output zeroed by an implementation that is wrong on purpose: the tokens change, and the difference is seen."""
    assert tokens(results, name, "zeros") != tokens(results, name)
    found = report(results, name, "zeros")
    assert found.counts[("zeros", "routed", "")] > 0
    assert min(layer.largest for layer in found.layers.values()) > 0.1


def test_a_cpu_keeps_vllms_kernels_unless_told_otherwise(results):
    for name, phase in (("llama-ngram", "automatic"), ("deepseek-mtp2-automatic", "main")):
        found = report(results, name, phase)
        assert found.total("routed") == 0
        assert found.total("left", "engine_faster") > 0
        assert set(found.codes("left")) == {"engine_faster", "decode", "prefill"}
    assert tokens(results, "llama-ngram", "automatic") == tokens(results, "llama-plain")


def test_disabled_hooks_nothing(results):
    for name in ("llama-plain", "deepseek-mtp2-off"):
        assert results[name]["hooked"] == []
        assert "flashmap is active" not in results[name]["log"]
        assert (report(results, name).counts if results[name]["phases"]["main"]["report"] else {}) == {}


@pytest.mark.parametrize("name", ["llama-ngram", "llama-ngram-apart"])
def test_the_entry_point_installs_and_says_so_once_in_each_process(results, name):
    assert len(results[name]["hooked"]) == 2
    active = [line for line in results[name]["log"].splitlines() if "flashmap is active in vLLM" in line]
    processes = {line.split("(process ")[1].split(")")[0] for line in active}
    assert active and len(active) == len(processes)


def test_by_hand_without_the_entry_point(results):
    assert any("CPU_ATTN" in hook for hook in results["llama-ngram-by-hand"]["hooked"])
    assert not any("backend CPU_MLA" in hook for hook in results["llama-ngram-by-hand"]["hooked"])
