"""Test mode: fills blocks of the pool as a plan says (`engine.poison`)."""

from ...compute.step_parts import StepPart
from ...core.plan import EvictionPlan
from ..engine.poison import Fills
from . import runners


class Filling(StepPart):
    """Fills freed blocks with NaN, and blocks that requests get with zeros."""

    def after_orders(self, plan: EvictionPlan) -> None:
        if (told := Fills.within(plan)) is not None:
            for blocks, value in ((told.poison, float("nan")), (told.clean, 0.0)):
                if blocks:
                    runners.fill_blocks(self.worker.model_runner, blocks, value)
