"""Compares stock vLLM's answers on two releases: those of a borrowed vLLM have to be its donor's.

    python tests/harness/stock_answers.py PYTHON

This Python has the donor, PYTHON the vLLM that borrows its compiled parts (scripts/borrow.py). Both answer the same
prompts with the same small random models. What came of it is added to borrowed.json, and printed. Exits with 1 if a
model answers otherwise, by a token or by a bit of a log-probability.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS = [list(range(1, 40)), list(range(100, 199)), [5, 6, 7] * 50]
TOKENS = 40


def make_models(folder: Path) -> list[Path]:
    """Write models with full attention, windows, shared caches and latents. None has experts."""
    from latent import make_latent
    from oracle import logits
    from oracle.tiny import make_tiny_llama

    paths = [folder / name for name in ("llama", "gemma2", "gemma4_text", "deepseek_v3")]
    make_tiny_llama(paths[0])
    for path in paths[1:3]:
        logits.make_tiny(path, path.name)
    make_latent(paths[3], "DeepseekV3ForCausalLM")
    return paths


def answers(path: str) -> list[Any]:
    """Return tokens and log-probabilities, as hexadecimal numbers, of stock vLLM's answers."""
    from vllm import LLM, SamplingParams

    llm = LLM(path, max_model_len=512, block_size=32, kv_cache_memory_bytes=64 << 20, enforce_eager=True, seed=0)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2, ignore_eos=True)
    outputs = [
        each.outputs[0] for each in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    ]
    return [
        [out.token_ids, [{token: its.logprob.hex() for token, its in row.items()} for row in out.logprobs]]
        for out in outputs
    ]


def asked(python: str, path: Path) -> str:
    """Return what a Python's vLLM answers; an error ends this."""
    # The plugin is among the packages of both, and is not loaded.
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([python, __file__, "--answer", path], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{path.name} got an error of {python}; expected answers:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def main(python: str) -> int:
    about = subprocess.run(
        [python, "-c", "from importlib.metadata import distribution as d; print(d('vllm').locate_file(''), d('vllm').version)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    borrowed = Path(about[0], f"vllm-{about[1]}.dist-info/borrowed.json")
    with tempfile.TemporaryDirectory() as folder:
        same = {path.name: asked(sys.executable, path) == asked(python, path) for path in make_models(Path(folder))}
    borrowed.write_text(json.dumps({**json.loads(borrowed.read_text()), "answers": same}, indent=1) + "\n")
    differ = [name for name, equal in same.items() if not equal]
    print(f"answers of {len(same)} models on both:", f"{', '.join(differ)} differ" if differ else "the same")
    return bool(differ)


if __name__ == "__main__":
    import preparation

    preparation.prepare()
    if sys.argv[1] == "--answer":
        print(json.dumps(answers(sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1]))
