"""A DeepSeek model with EAGLE (NEXTN) in SGLang, without and with FlashMap: latency, tokens, acceptance length, tokens per second.

    python examples/deepseek_eagle_sglang.py --tiny

needs SGLang, flashmap-verify in its environment, and one GPU: the model is a small trained DeepSeek (benchmarks/models). With real weights
on eight GPUs (what follows ``--`` is SGLang's own):

    python examples/deepseek_eagle_sglang.py --model deepseek-ai/DeepSeek-R1 --backend fa3 -- \
        --tp 8 --trust-remote-code --model-loader-extra-config '{"enable_multithread_load": true, "num_threads": 8}'

The server loads the plugin by itself; its log says ``flashmap is active in SGLang``. The request is that of
``python -m sglang.test.send_one``, and so is the table.
"""

from __future__ import annotations

import argparse

from sglang_server import arguments, post, server, table

PROMPT = "Human: Give me a fully functional FastAPI server. Show the python code.\n\nAssistant:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    options = arguments(parser)
    rows = []
    for flashmap in (False, True):
        with server(options, flashmap=flashmap) as address:
            body = {
                "text": PROMPT,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": options.max_new_tokens, "ignore_eos": options.tiny},
            }
            post(f"{address}/generate", body)  # the first one compiles
            told = post(f"{address}/generate", body)["meta_info"]
        tokens, latency, steps = told["completion_tokens"], told["e2e_latency"], told.get("spec_verify_ct") or told["completion_tokens"]
        rows.append(["with" if flashmap else "without", f"{latency:.3f}", str(tokens), f"{tokens / steps:.3f}", f"{tokens / latency:.2f}"])
    print(table(["FlashMap", "Latency (s)", "Tokens", "Acc Length", "Speed (token/s)"], rows))


if __name__ == "__main__":
    main()
