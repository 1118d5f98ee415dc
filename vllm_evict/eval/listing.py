"""`vllm-evict policies`: what there is, and what one policy comes to."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import KVPolicyConfig
from ..policies import POLICIES
from ..sources import presets


def show_all(console: Console) -> None:
    """Tables of policies and presets."""
    table = _table("policy", "paper", "measures", "when")
    for name, policy in sorted(POLICIES.items()):
        triggers = policy.triggers if policy.options else ()
        _add(table, name, policy.paper, ", ".join(sorted(policy.measures)), ", ".join(triggers))
    console.print(table)
    table = _table("preset", "policy", "fields that differ from the policy's own")
    for name, path in presets().items():
        config = KVPolicyConfig.parse(path)
        own = KVPolicyConfig.parse(config.name).to_dict()
        _add(table, name, config.name, ", ".join(f"{k}={v}" for k, v in config.to_dict().items() if v != own[k]))
    console.print(table)


def show_one(policy: str, console: Console) -> None:
    """Table of all fields of one policy, with those that were left out.

    Raises:
        KVPolicyError: the policy is wrong.
    """
    table = _table("field", "value")
    for field, value in KVPolicyConfig.parse(policy).to_dict().items():
        _add(table, field, str(value))
    console.print(table)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))
