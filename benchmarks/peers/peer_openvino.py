"""Runs OpenVINO GenAI in an environment of its own: continuous batching in a pool of blocks of 32 tokens.

Its cache eviction starts once a prompt is computed, so the first decision has seen the question, and a prompt's peak is
the prompt. Each layer keeps blocks of its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Clock, Load, main, one_line

#: Aggregation of scores; None evicts nothing.
CASES = {"full": None, "NORM_SUM": "NORM_SUM", "SUM": "SUM", "ADAPTIVE_RKV": "ADAPTIVE_RKV"}
LOADS = ["full", "NORM_SUM", "ADAPTIVE_RKV"]
BFLOAT16 = ["full", "NORM_SUM"]
FP8 = ["full", "NORM_SUM"]
SERVED = ["full", "SUM", "NORM_SUM"]
NEEDLES = list(CASES)


def converted(spec: dict) -> str:
    """The model in OpenVINO's format."""
    out = Path(spec["converted"])
    if not (out / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM

        model = OVModelForCausalLM.from_pretrained(spec["model"], export=True, load_in_8bit=False, compile=False)
        model.save_pretrained(out)
    return str(out)


def pipeline(spec: dict, name: str, blocks: int, requests: int, chunk: int, sizes: tuple[int, int, int]) -> Any:
    """A pipeline; `sizes` are the sinks, recent tokens and budget that each sequence keeps."""
    import os

    import openvino_genai as genai

    config = genai.SchedulerConfig()
    config.num_kv_blocks, config.max_num_seqs, config.max_num_batched_tokens = blocks, requests, chunk
    config.dynamic_split_fuse, config.enable_prefix_caching = True, False
    if CASES[name]:
        config.use_cache_eviction = True
        config.cache_eviction_config = genai.CacheEvictionConfig(*sizes, getattr(genai.AggregationMode, CASES[name]))
    precision = "bf16" if spec["dtype"] == "bfloat16" else "f32"
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": spec.get("cache", precision),
        "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
    }
    return genai.ContinuousBatchingPipeline(converted(spec), config, "CPU", options)


def load(name: str, spec: dict) -> Iterator[Load]:
    prompts = spec["prompts"]
    sizes = spec["sink"], spec["recent"], spec["budget"]
    # Its scales and zero points of u8 come on top.
    fit = spec["pool"] * (4 if spec.get("cache") == "u8" else 1)
    pipe = pipeline(spec, name, fit // spec["block"], len(prompts), spec["chunk"], sizes)
    batch(pipe, spec["warm"], [spec["output"] // 8] * len(spec["warm"]), ends=False)
    for requests in spec["batches"]:
        row, clock = Load(name, requests), Clock()
        answers, usage = batch(pipe, prompts[:requests], [spec["output"]] * requests, ends=False, row=row)
        clock.stop(row)
        row.keep(answers, spec)
        row.peak_kv_bytes = round(usage / 100 * spec["pool"] * spec["kv_bytes_per_token"])
        yield row


def batch(
    pipe: Any, prompts: list[list[int]], output: list[int], ends: bool, row: Load | None = None
) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and the largest share of the pool in use, in percent; a row gets what it counts."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    clock, handles, first, usage = Clock(), [], {}, 0.0
    for index, (prompt, most) in enumerate(zip(prompts, output, strict=True)):
        config = genai.GenerationConfig(max_new_tokens=most, ignore_eos=not ends, do_sample=False)
        if not ends:
            config.set_eos_token_id(0)  # random models have none, and it wants one
        handles.append(pipe.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), config))
    answers: list[list[int]] = [[] for _ in prompts]
    while pipe.has_non_finished_requests():
        pipe.step()
        metrics = pipe.get_metrics()
        usage = max(usage, metrics.cache_usage)
        if row:
            row.at_once = max(row.at_once, metrics.scheduled_requests)
        for index, handle in enumerate(handles):
            while handle.can_read():
                first.setdefault(index, clock.seconds)
                for output_of in handle.read().values():
                    answers[index] += output_of.generated_ids
    if row:
        row.first = [first[index] for index in range(len(prompts))]
    return answers, usage


def needles(names: list[str], spec: dict) -> Iterator[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    prompts = [sample["context"] + sample["question"] for sample in spec["samples"]]
    output = [sample["max_tokens"] for sample in spec["samples"]]
    blocks = sum(-(-(len(prompt) + most) // spec["block"]) + 1 for prompt, most in zip(prompts, output))
    for name in names:
        for budget, tokens in spec["budgets"].items() if CASES[name] else [(None, spec["length"])]:
            row: dict[str, Any] = {"case": name, "setting": "aware", "budget": budget}
            try:
                sizes = spec["sink"], spec["recent"], tokens
                pipe = pipeline(spec, name, blocks, len(prompts), spec["length"], sizes)
                ids, _ = batch(pipe, prompts, output, ends=True)
                yield row | {"answers": [tokenizer.decode(answer, skip_special_tokens=True) for answer in ids]}
            except Exception as error:  # its own refusal is a result
                yield row | {"error": one_line(error)}
                break


if __name__ == "__main__":
    main(load, needles, ("openvino-genai", "openvino", "optimum-intel"))
