"""A client of `vllm serve MODEL --kv-policy h2o`: requests under the server's policy, then under their own.

python examples/online_client.py [http://localhost:8000/v1]        (needs `pip install openai`)
"""

import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "The old town lies by the river, and its market is open every day. " * 60}]

for policy in (None, {"kv_policy": "sink-window", "kv_budget": 512}, {"kv_policy": "nothing-of-the-kind"}):
    try:
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=64, extra_body={"vllm_xargs": policy} if policy else None
        )
        print(f"{policy or 'the server'}: {answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens")
    except BadRequestError as error:
        print(f"{policy}: {error}")
