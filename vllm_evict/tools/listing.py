"""`vllm-evict policies`: lists policies and presets, and the fields of one policy."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import REGISTRY, KVPolicyConfig, presets
from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, MASS, PER_TOKEN, READ
from ..config.options import names_of
from ..config.sizes import SHARES
from ..config.sources import read
from ..policies import POLICIES


def show_all(console: Console) -> None:
    """Tables of policies and presets."""
    table = _table("policy", "paper", "measures", "when", "fields of its own")
    shared = names_of((*KEEPING, *READ, *MASS, *PER_TOKEN))
    for name, policy in sorted(POLICIES.items()):
        triggers = () if name == "full" else policy.triggers
        common = shared | (names_of(ALLOCATION) if "allocate" in policy.options else set())
        fields = ", ".join(option.name for option in policy.declares if option.name not in common)
        _add(table, name, policy.paper, ", ".join(sorted(policy.measures)), ", ".join(triggers), fields)
    for name, why in sorted(REGISTRY.broken.items()):
        _add(table, name, why)
    console.print(table)
    table = _table("preset", "policy", "fields that differ from the policy's own")
    for preset, path in presets().items():
        fields, _ = read(str(path))
        own = {"name": fields["name"], **POLICIES[fields["name"]].defaults}
        _add(table, preset, fields["name"], ", ".join(f"{k}={v}" for k, v in fields.items() if v != own[k]))
    console.print(table)


def show_one(policy: str, console: Console) -> None:
    """Table of all fields of one policy, given or not.

    Raises:
        KVPolicyError: the policy is wrong.
    """
    table = _table("field", "value")
    config = KVPolicyConfig.parse(policy)
    for field, value in config.effective().items():
        text = str(value)
        if field in SHARES and field in config.unsaid and 0 < value < config.policy.defaults[field]:
            text = f"{value} (at most 1/{SHARES[field]} of the budget, in whole blocks)"
        _add(table, field, text)
    console.print(table)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))
