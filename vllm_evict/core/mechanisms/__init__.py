"""Mechanisms: each is one way in which requests lose blocks, or have keys rotated."""

from .base import Group, Host, Mechanism, Step
from .budget import Budget
from .context import Context
from .pressure import Pressure
from .profiles import Profiles
from .recall import Again, Recall
from .shared import SharedBudget

__all__ = [
    "Again", "Budget", "Context", "Group", "Host", "Mechanism", "Pressure", "Profiles", "Recall", "SharedBudget",
    "Step",
]  # fmt: skip
