"""Wrong values in every field of a policy, at start and in a request: refused by name, in a line, at little cost."""

import itertools
from functools import partial

import pytest
from loads import inputs

from vllm_evict.config import REGISTRY, REQUEST_FIELDS, KVPolicyConfig, KVPolicyError
from vllm_evict.policies import POLICIES

OPTIONS = {name: policy.options for name, policy in POLICIES.items()}
CASES = 1500
#: Process time, not the clock's. A case is one in a thousand that takes more than 0.05 s; this is ten times as much.
MOST_SECONDS = 0.5


def check(cases, call):
    tried = [inputs.attempt(case, call, KVPolicyError) for case in itertools.islice(cases, CASES)]
    for each in tried:
        assert each.message is not None, f"{each.case.where} accepted: {each.case.value!r:.200}"
        assert not inputs.complaint(each.message), (each.case.where, each.message)
        assert each.seconds < MOST_SECONDS, (each.case.where, f"{each.case.value!r:.200}")
    print(inputs.summary(tried))
    return tried


def test_the_grammar_knows_every_field(tmp_path):
    assert set(OPTIONS) == set(inputs.NAMES) and inputs.REQUEST_FIELDS == REQUEST_FIELDS
    tried = {case.where for case in itertools.islice(inputs.at_start(0, OPTIONS, tmp_path, longest=1000), 400)}
    assert tried >= {"name", "allow"}.union(*OPTIONS.values())


def test_wrong_policies_are_refused_at_start(tmp_path):
    tried = check(inputs.at_start(1, OPTIONS, tmp_path, longest=300_000), KVPolicyConfig.parse)
    named = [each for each in tried if each.case.where in {"name", "allow", *REGISTRY.fields()}]
    for each in named:
        assert each.case.where in each.message or each.case.where == "name", (each.case.where, each.message)
    assert len(named) > CASES / 2


def test_wrong_fields_of_a_request_are_refused():
    server = KVPolicyConfig.parse({"name": "h2o", "budget": 256, "sink": 32, "recent": 64})
    tried = check(inputs.in_request(2, longest=300_000), partial(server.for_request, prompt_len=1000, block_size=32))
    for each in tried:
        field = each.case.where if each.case.where != "unknown field" else "unknown request field"
        assert field.removeprefix("kv_") in each.message or field == "kv_policy", (field, each.message)


@pytest.mark.parametrize("where, value", [("file", "# " + "x" * 10_000_000), ("text", "{" + "x" * 10_000_000)])
def test_ten_megabytes_are_refused_by_their_size(tmp_path, where, value):
    if where == "file":
        path = tmp_path / "long.yaml"
        path.write_text(value)
        value = path
    tried = inputs.attempt(inputs.Case(where, value), KVPolicyConfig.parse, KVPolicyError)
    assert "at most" in tried.message and tried.seconds < MOST_SECONDS
