"""Eviction policies: one short file each.

To add one, write its file and name its class here; the test matrix and the documentation table pick it up.
"""

from .base import BUDGET_OPTIONS, MASS_OPTIONS, Blocks, Policy
from .full import Full
from .h2o import H2O
from .sink_window import SinkWindow

POLICIES: dict[str, Policy] = {policy.name: policy() for policy in (Full, SinkWindow, H2O)}

__all__ = ["BUDGET_OPTIONS", "MASS_OPTIONS", "POLICIES", "Blocks", "Policy"]
