"""Policies that other distributions bring: a field of their own is seen in parsing, help and listing, and evicts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOY = '''
import numpy as np

from vllm_evict.config.fields import KEEPING
from vllm_evict.config.options import Option, whole
from vllm_evict.policies import Policy

STEP = Option("step", whole(2), 3, "every so many blocks stay")


class Toy(Policy):
    """Every `step`-th block stays, the others go from the oldest on."""

    name = "toy"
    paper = "A. Friend, A toy, 2026"
    declares = (*KEEPING, STEP)

    def check(self, config):
        if config.step == 13:
            raise ValueError("step: 13 brings no luck")

    def importance(self, blocks):
        return np.where(blocks.index % blocks.config.step, blocks.index, 1 << 40)
'''


@pytest.fixture
def outside(tmp_path):
    """`outside(modules, entries)`: an installed distribution on a path of its own; returns `run(code)` beside it."""

    def install(modules, entries):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / "friends-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: friends\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[vllm_evict.policies]", *lines]))
        path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "tests/harness")])
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "400"}

        def run(*command):
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            return done

        return run

    return install


def test_a_policy_from_outside_has_its_own_field_everywhere_and_evicts(outside, tiny):
    """Of 13 blocks before the first decision: sinks, recent blocks, and every fourth in between."""
    run = outside({"toy": TOY}, {"toy": "toy:Toy"})
    done = run(
        "-c",
        """
import json, sys
import preparation  # settings of the environment
from vllm_evict import KVPolicyConfig, KVPolicyError
from vllm_evict.config import REGISTRY
from vllm_evict.integration.start.arguments import FIELDS, HELP

def refusal(value):
    try:
        return KVPolicyConfig.parse(value) and None
    except KVPolicyError as error:
        return str(error)

server = KVPolicyConfig.parse("h2o")
toy = KVPolicyConfig.parse({"name": "toy", "budget": 320, "step": 5})
print("SAID", json.dumps({
    "step": [KVPolicyConfig.parse("toy").step, toy.step, server.step, KVPolicyConfig.parse(toy.to_dict()).step],
    "request": server.for_request({"kv_policy": "toy", "kv_budget": 288}, 5000, 32).name,
    "wrong": [refusal({"name": "toy", **more}) for more in ({"step": 1}, {"step": "3"}, {"stp": 3}, {"step": 13})],
    "unknown": refusal({"name": "h2o", "step": 3}),
    "meant": refusal("toi"),
    "help": [line in " ".join(HELP.split()) for line in ("step every so many blocks stay", "toy")] + ["step" in FIELDS],
    "table": [row for row in REGISTRY.table().splitlines() if "`step`" in row],
}))
from engine import Engine, random_prompt
policy = {"name": "toy", "budget": 224, "buffer": 96, "sink": 32, "recent": 64, "step": 4, "allow": []}
server = Engine(sys.argv[1], policy, max_num_batched_tokens=512)
_, (trace,) = server.traced([(random_prompt(400), dict(max_tokens=40))])
print("EVICTED", [gone for gone in trace.evicted if gone])
server.close()
""",
        str(tiny),
    )
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("SAID", "EVICTED")))
    said, (first, *_) = json.loads(told["SAID"]), json.loads(told["EVICTED"])
    assert first and not {0, 4, 8} & set(first) and set(first) <= {1, 2, 3, 5, 6, 7, 9, 10}
    assert said["step"] == [3, 5, 3, 5] and said["request"] == "toy"
    few, text, typo, luck = said["wrong"]
    assert (
        few.startswith("step: input should be greater than or equal to 2") and text == "step: must be a number, not '3'"
    )
    assert (
        typo.startswith("policy 'toy' has no field 'stp': did you mean 'step'?") and luck == "step: 13 brings no luck"
    )
    assert said["unknown"].startswith("policy 'h2o' has no field 'step': ")
    assert said["meant"].startswith("unknown KV policy 'toi': did you mean 'toy'?")
    assert said["help"] == [True, True, True]
    assert said["table"] == ["| `step` | `toy` | 3 | every so many blocks stay |"]
    command = "from vllm_evict.cli import main; main()"
    listed = run("-c", f"import sys; sys.argv[1:] = ['policies']; {command}").stdout
    (line,) = (line for line in listed.splitlines() if line.startswith("toy"))
    assert "A. Friend" in line and line.split()[-1] == "step"
    shown = run("-c", f'import sys; sys.argv[1:] = [\'policies\', \'{{"name": "toy", "step": 4}}\']; {command}').stdout
    assert ["step", "4"] in [line.split() for line in shown.splitlines()]


BROKEN = {
    "gone": ("nowhere:Gone", "ModuleNotFoundError: No module named 'nowhere'"),
    "lost": ("toy:Lost", "AttributeError: module 'toy' has no attribute 'Lost'"),
    "number": ("toy:STEP", "expected a subclass of vllm_evict.policies.Policy"),
    "renamed": ("toy:Toy", "the class is called 'toy'; expected 'renamed'"),
    "clash": ("clash:Clash", "the field 'window' differs from the field of that name in another policy"),
    "taken": ("clash:Taken", "'parse' can't be the name of a field"),
    "odd": ("clash:Odd", "measures luck; expected any of"),
    "h2o": ("clash:H2O", "the name 'h2o' is taken by another policy"),
}
CLASH = """
from vllm_evict.config.options import Option, whole
from toy import Toy

def policy(named, *declared, **own):
    return type("Made", (Toy,), {"name": named, "declares": declared, **own})

Clash = policy("clash", Option("window", whole(), 3, "no window of queries"))
Taken = policy("taken", Option("parse", whole(), 3, "a method's name"))
Odd = policy("odd", measures=frozenset({"luck"}))
H2O = policy("h2o")
"""


def test_broken_policies_are_refused_by_their_reason_and_harm_no_other(outside):
    run = outside(
        {"toy": TOY, "clash": CLASH}, {"toy": "toy:Toy", **{name: entry for name, (entry, _) in BROKEN.items()}}
    )
    done = run(
        "-c",
        f"""
import json
from vllm_evict import KVPolicyConfig, KVPolicyError
said = {{}}
for name in {sorted(BROKEN)!r}:
    try:
        said[name] = KVPolicyConfig.parse(name).policy.paper
    except KVPolicyError as error:
        said[name] = str(error)
print(json.dumps([said, KVPolicyConfig.parse("toy").step]))
""",
    )
    said, step = json.loads(done.stdout)
    assert step == 3 and said.pop("h2o").startswith("Zhang et al.")
    for name, message in said.items():
        entry, why = BROKEN[name]
        assert message.startswith(f"KV policy {name!r} of friends ({entry}) can't be used: ") and why in message
    for name, (_, why) in BROKEN.items():
        assert sum(f"KV policy {name!r}" in line and why in line for line in done.stderr.splitlines()) == 1
