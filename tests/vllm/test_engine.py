"""Real vLLM engines on a CPU with the small trained models (benchmarks/models): speculation with the plugin, without it, and none.

Tokens are compared in fp32, where the engine's own paths agree to 1e-5 of an output and no near-tie decides; the difference from
the engine's kernel is taken in bf16 too. Each engine costs 5 to 15 seconds, so every run serves several tests.
"""

import pytest

pytest.importorskip("vllm")

from benchmarks.models import data
from flashmap.adapters import observe

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
OFF = {"FLASHMAP_DISABLE": "1"}
DENSE = {"FLASHMAP_IMPL": "torch_dense", "FLASHMAP_CHECK": "1"}
# Controls: wrong on purpose (site/). Little is accepted then, so that a token costs more than elsewhere.
ZEROS = {"name": "zeros", "env": {"FLASHMAP_IMPL": "zeros"}, "tokens": 12}
ANOTHER = {"name": "another_request", "env": {"FLASHMAP_IMPL": "another_request"}, "tokens": 12}
AUTOMATIC = {"name": "automatic", "env": {"FLASHMAP_IMPL": None}}


def mtp(k):
    return {"method": "mtp", "num_speculative_tokens": k}


@pytest.fixture(scope="module")
def plan(model_dirs, tmp_path_factory):
    """The runs, by name. The name's first word is the target: runs of one target must give the same tokens."""
    stats = tmp_path_factory.mktemp("stats")

    def run(name, speculative, *, dtype="float32", env=None, phases=(), **more):
        model = {"llama": "llama_tiny", "deepseek": "deepseek_v3_tiny"}[name.split("-")[0]]
        backend = "CPU_MLA" if model == "deepseek_v3_tiny" else "CPU_ATTN"
        phases = [{"name": "main"}, *phases]
        return {"name": name, "model": model_dirs[model], "speculative": speculative, "dtype": dtype, "backend": backend, "env": env or {}, "phases": phases, **more}  # fmt: skip

    def apart(name):
        """The engine in a process of its own, whose counters come by files."""
        return DENSE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FLASHMAP_STATS_DIR": str(stats / name)}

    draft = {"method": "draft_model", "num_speculative_tokens": 3, "model": model_dirs["llama_tiny_cut"]}
    eagle = {"method": "eagle", "num_speculative_tokens": 5, "model": model_dirs["llama_tiny_eagle"]}
    eagle3 = {"method": "eagle3", "num_speculative_tokens": 5, "model": model_dirs["llama_tiny_eagle3"]}
    return [
        run("llama-plain", None, env=OFF),
        run("deepseek-plain", None, env=OFF),
        run("llama-ngram-off", NGRAM, env=OFF),
        run("llama-eagle-off", eagle, env=OFF),
        run("llama-eagle3-off", eagle3, env=OFF),
        run("deepseek-mtp3-off", mtp(3), env=OFF),
        run("llama-ngram", NGRAM, env=DENSE, phases=[AUTOMATIC, ZEROS, ANOTHER]),
        run("llama-draft", draft, env=DENSE),
        run("llama-eagle", eagle, env=DENSE),
        run("llama-eagle3", eagle3, env=DENSE),
        run("deepseek-mtp1", mtp(1), env=DENSE),
        run("deepseek-mtp3", mtp(3), env=DENSE, phases=[ZEROS, ANOTHER]),
        run("deepseek-mtp3-automatic", mtp(3)),
        run("llama-eagle-bf16", eagle, dtype="bfloat16", env=DENSE),
        run("deepseek-mtp3-bf16", mtp(3), dtype="bfloat16", env=DENSE),
        run("llama-ngram-apart", NGRAM, env=apart("llama-ngram-apart")),
        run("deepseek-mtp3-apart", mtp(3), env=apart("deepseek-mtp3-apart")),
        run("llama-ngram-by-hand", NGRAM, env=DENSE | {"VLLM_PLUGINS": ""}, install=["CPU_ATTN"]),
    ]


@pytest.fixture(scope="module")
def prompts():
    """Held-out text, of different lengths."""
    return [data.text(tokens) for tokens in data.prompts(6, longest=200)]


@pytest.fixture(scope="module")
def results(run_engines, plan, prompts):
    found = run_engines(plan, prompts)
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


def metric(results, name, what):
    return results[name]["phases"]["main"]["metrics"][f"vllm:spec_decode_num_{what}"]


def tokens_per_step(results, name):
    return 1 + metric(results, name, "accepted_tokens") / metric(results, name, "drafts")


ROUTED = ["llama-ngram", "llama-draft", "llama-eagle", "llama-eagle3", "deepseek-mtp1", "deepseek-mtp3"]
APART = ["llama-ngram-apart", "deepseek-mtp3-apart"]
BF16 = ["llama-eagle-bf16", "deepseek-mtp3-bf16"]
OTHERS_OFF = ["llama-ngram-off", "llama-eagle-off", "llama-eagle3-off", "deepseek-mtp3-off"]
LAYERS = {"llama-ngram": 8, "llama-draft": 15, "llama-eagle": 9, "llama-eagle3": 9, "deepseek-mtp1": 4, "deepseek-mtp3": 4}


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
        assert differences.largest <= 1e-5 * differences.scale, layer


@pytest.mark.parametrize("name", BF16)
def test_largest_difference_in_bf16(results, name, record_property):
    """At most two roundings of the largest output."""
    found = report(results, name)
    record_property("largest", found.largest)
    assert found.layers
    for layer, differences in found.layers.items():
        assert differences.largest <= 2**-7 * differences.scale, layer


@pytest.mark.parametrize("name", [*ROUTED, *APART, *OTHERS_OFF, "llama-ngram-by-hand", "deepseek-mtp3-automatic"])
def test_tokens_are_those_without_speculation(results, name):
    assert tokens(results, name) == tokens(results, name.split("-")[0] + "-plain")


@pytest.mark.parametrize("off", OTHERS_OFF)
def test_drafts_are_accepted_as_without_the_plugin(results, off):
    assert metric(results, off.removesuffix("-off"), "accepted_tokens") == metric(results, off, "accepted_tokens")


@pytest.mark.parametrize("name", [*ROUTED, *BF16])
def test_speculation_is_real(results, name, record_property):
    """More than 1.8 tokens a step (1.5 where there can be no more than two); and not all that is drafted is right."""
    record_property("tokens_per_step", tokens_per_step(results, name))
    assert tokens_per_step(results, name) > (1.5 if name == "deepseek-mtp1" else 1.8)
    assert metric(results, name, "accepted_tokens") < metric(results, name, "draft_tokens")


def test_text_in_text_out(results, prompts):
    """The models' tokenizer in the engine: a token is a byte."""
    for name in ("llama-plain", "deepseek-plain", "llama-eagle"):
        found = results[name]["phases"]["main"]
        assert found["prompts"] == [list(prompt.encode()) for prompt in prompts]
        assert found["texts"] == [data.text(ids) for ids in found["tokens"]]


@pytest.mark.parametrize("wrong", ["zeros", "another_request"])
@pytest.mark.parametrize("name", ["llama-ngram", "deepseek-mtp3"])
def test_wrong_attention_changes_the_tokens(results, name, wrong):
    """By an implementation that is wrong on purpose; and the difference is seen in every layer."""
    assert tokens(results, name, wrong) != [ids[: ZEROS["tokens"]] for ids in tokens(results, name)]
    found = report(results, name, wrong)
    assert found.counts[(wrong, "routed", "")] > 0
    assert min(layer.largest / layer.scale for layer in found.layers.values()) > 0.1


def test_a_cpu_keeps_vllms_kernels_unless_told_otherwise(results):
    for name, phase in (("llama-ngram", "automatic"), ("deepseek-mtp3-automatic", "main")):
        found = report(results, name, phase)
        assert found.total("routed") == 0
        assert found.total("left", "engine_faster") > 0
        assert set(found.codes("left")) == {"engine_faster", "decode", "prefill"}
    assert tokens(results, "llama-ngram", "automatic") == tokens(results, "llama-plain")


def test_disabled_hooks_nothing(results):
    for name in ("llama-plain", "deepseek-mtp3-off"):
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
