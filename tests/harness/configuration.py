"""Shared by tests of the configuration: a policy, and the words of refusals."""

import pytest

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.policies import POLICIES

H2O = {"name": "h2o", "budget": 1024, "sink": 32, "recent": 256, "buffer": 64}
parse = KVPolicyConfig.parse
#: Policies of all heads alike.
WHOLE = sorted(name for name, policy in POLICIES.items() if not policy.allocator.splits)


def refusal(value):
    """The message with which a value is refused."""
    with pytest.raises(KVPolicyError) as error:
        parse(value)
    return str(error.value)


def asked(server, extra_args, prompt=5000, block=32):
    return parse(server).for_request(extra_args, prompt, block)


def request_refusal(server, extra_args, prompt=5000, block=32):
    with pytest.raises(KVPolicyError) as error:
        asked(server, extra_args, prompt, block)
    return str(error.value)
