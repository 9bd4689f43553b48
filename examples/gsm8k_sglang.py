"""Accuracy before and after: SGLang's few-shot GSM8K benchmark on a server with speculative decoding, without and with FlashMap.

    python examples/gsm8k_sglang.py --tiny

needs SGLang, flashmap-verify in its environment, and one GPU. The tiny model cannot do arithmetic: that mode asks a few questions that it
writes itself, to show that both servers answer them alike. With real weights on eight GPUs (what follows ``--`` is SGLang's own):

    python examples/gsm8k_sglang.py --model deepseek-ai/DeepSeek-R1 --backend fa3 --num-questions 1319 --num-shots 8 --parallel 1319 -- \
        --tp 8 --trust-remote-code

Without ``--data-path`` the benchmark (``sglang.test.few_shot_gsm8k``) downloads its questions.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from sglang_server import arguments, server, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--data-path", help="GSM8K's test.jsonl")
    options = arguments(parser)
    rows, answers = [], []
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny and options.data_path is None:
            options.data_path, options.num_questions, options.num_shots, options.max_new_tokens = str(_sums(Path(folder))), 16, 2, 64
        for flashmap in (False, True):
            with server(options, flashmap=flashmap) as address:
                found, texts = _run(options, address, Path(folder))
            answers.append(texts)
            rows.append(
                [
                    "with" if flashmap else "without",
                    *(f"{found[key]:.3f}" for key in ("accuracy", "invalid", "latency", "output_throughput")),
                ]
            )
    print(table(["FlashMap", "Accuracy", "Invalid", "Latency (s)", "Output (token/s)"], rows))
    print(f"the same answers, word for word: {'yes' if answers[0] == answers[1] else 'no'}")


def _run(options: argparse.Namespace, address: str, folder: Path) -> tuple[dict[str, float], str]:
    """What SGLang's benchmark finds, and the answers that it wrote into its working directory."""
    from sglang.test.few_shot_gsm8k import run_eval

    host, _, port = address.removeprefix("http://").rpartition(":")
    before = os.getcwd()
    os.chdir(folder)
    try:
        found = run_eval(argparse.Namespace(**{**vars(options), "host": host, "port": int(port), "temperature": 0.0}))
        return found, "".join(path.read_text() for path in folder.glob("tmp_output_gsm8k.txt"))
    finally:
        os.chdir(before)


def _sums(folder: Path) -> Path:
    lines = [{"question": f"What is {a} plus {a + 3}?", "answer": f"{a} + {a + 3} = {2 * a + 3}\n#### {2 * a + 3}"} for a in range(16)]
    path = folder / "test.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


if __name__ == "__main__":
    main()
