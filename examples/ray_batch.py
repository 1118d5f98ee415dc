"""Ray Data: a table of prompts under one policy, rows with a policy of their own, and the usage of each.

python examples/ray_batch.py [MODEL]        (the embedded model, if none is named; needs `pip install 'ray[data]'`)
"""

import sys
from pathlib import Path

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from vllm.platforms import current_platform

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "needle/model")
STORY = "The old town lies by the river, and its market is open every day. " * 60
ROWS = [
    {"prompt": STORY, "asked": {}},
    {"prompt": STORY[1000:], "asked": {"kv_policy": "sink-window", "kv_budget": 256}},
    {"prompt": STORY, "asked": {"kv_budget": 9999}},
]


def request(row):
    # kv_usage is among an output's metrics, which Ray Data passes on.
    return {
        "prompt": row["prompt"],
        "sampling_params": {"max_tokens": 64, "temperature": 0, "extra_args": {**row["asked"], "kv_usage": True}},
    }


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)  # or ray.init("auto") for a running cluster
    policy = {"name": "h2o", "budget": 512, "sink": 32, "recent": 128}
    config = vLLMEngineProcessorConfig(
        model_source=MODEL,
        engine_kwargs={"kv_policy": policy, "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20},
        # On GPUs Ray Data makes its own bundles.
        placement_group_config={"bundles": [{"CPU": 1}]} if current_platform.is_cpu() else None,
        should_continue_on_error=True,
        # Prompts are text, which vLLM tokenizes.
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    processor = build_processor(config, preprocess=request)
    for row in processor(ray.data.from_items(ROWS)).take_all():
        if row["__inference_error__"]:
            print(row["__inference_error__"])
        else:
            usage = row["metrics"]["kv_usage"]
            print(f"{row['num_input_tokens']} + {row['num_generated_tokens']} tokens: {usage}")
    ray.shutdown()
