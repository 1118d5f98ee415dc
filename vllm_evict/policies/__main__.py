"""`python -m vllm_evict.policies`: the table of fields of docs/policies.md."""

from ..config import REGISTRY

print(REGISTRY.table())
