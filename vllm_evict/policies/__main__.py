"""`python -m vllm_evict.policies` prints the table of fields of docs/policies.md."""

from ..config import REGISTRY

print(REGISTRY.table())
