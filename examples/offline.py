"""Offline: a batch under one policy, and the usage of each request.

python examples/offline.py [MODEL]        (the embedded model, if none is named)
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "needle/model")
STORY = "The old town lies by the river, and its market is open every day. " * 60

if __name__ == "__main__":
    policy = {"name": "h2o", "budget": 512, "sink": 32, "recent": 128}
    llm = LLM(MODEL, kv_policy=policy, max_model_len=2048, kv_cache_memory_bytes=256 << 20)
    server_wide = SamplingParams(max_tokens=64, temperature=0)
    its_own = SamplingParams(max_tokens=64, temperature=0, extra_args={"kv_policy": "sink-window", "kv_budget": 384})
    for output in llm.generate([STORY, STORY[1000:]], [server_wide, its_own]):
        print(f"{len(output.prompt_token_ids)} + {len(output.outputs[0].token_ids)} tokens: {output.kv_usage}")
