"""Ray Serve LLM with a policy, and a client: requests under the server's policy, then under their own, and metrics.

python examples/ray_serve.py [MODEL [PORT]]        (the embedded model on 8000, if none is named)
"""

import re
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import ray
from openai import BadRequestError, OpenAI
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from vllm.platforms import current_platform

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "needle/model")
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
STORY = "The old town lies by the river, and its market is open every day. " * 60

if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, _metrics_export_port=PORT + 1)  # or "auto" for a running cluster
    serve.start(http_options={"port": PORT})
    policy = {"name": "h2o", "budget": 512, "sink": 32, "recent": 128}
    config = LLMConfig(
        model_loading_config={"model_id": "mine", "model_source": MODEL},
        engine_kwargs={"kv_policy": policy, "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20},
        accelerator_config={"kind": "cpu"} if current_platform.is_cpu() else None,
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    )
    one = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
    serve.run(build_openai_app({"llm_configs": [config], "ingress_deployment_config": one}))

    client = OpenAI(base_url=f"http://localhost:{PORT}/v1", api_key="none")
    messages = [{"role": "user", "content": STORY}]
    for own in ({}, {"kv_policy": "sink-window", "kv_budget": 256}, {"kv_policy": "nothing-of-the-kind"}):
        try:
            xargs = {"vllm_xargs": {**own, "kv_usage": 1}}
            answer = client.chat.completions.create(model="mine", messages=messages, max_tokens=64, extra_body=xargs)
            print(f"{own or 'the server'}: {answer.usage.total_tokens} tokens, {answer.usage.kv_usage}")
        except BadRequestError as error:
            print(f"{own}: {error.status_code} {error.body['message'].split(' (')[0]}")

    # Ray collects its metrics every few seconds.
    evicted = re.compile(r'^ray_vllm_kv_evict_blocks_evicted_total{.*policy="(.*)"} (.*)', re.MULTILINE)
    while len(found := evicted.findall(urlopen(f"http://localhost:{PORT + 1}/metrics").read().decode())) < 2:
        time.sleep(1)
    for name, blocks in sorted(found):
        print(f"{name}: {blocks} blocks evicted")
    serve.shutdown()
    ray.shutdown()
