"""Checks workers' reports before any decision uses them: a flawed report counts as missing."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from .plan import GroupPlan, Report, Reports

logger = logging.getLogger("vllm.evict")


class Inbox:
    """Takes in reports, and logs the first flaw that it finds."""

    def __init__(self) -> None:
        self._said = False

    def take(
        self, reports: Any, plans: Sequence[GroupPlan], held: Callable[[int, str], np.ndarray | None]
    ) -> list[Reports]:
        """Select the reports that the plans ask for and that have no flaw.

        Args:
            reports: what came with the step's output; expected is a list with `Reports` for each KV group.
            plans: plans of that step, one for each KV group.
            held: (KV group, request) -> int64 [n], resident logical blocks, ascending; None if the request is gone.

        Returns:
            `Reports` for each KV group, without missing and flawed reports.
        """
        if reports is None or not any(plan.report for plan in plans):
            return [{} for _ in plans]
        if not isinstance(reports, list) or list(map(type, reports)) != [dict] * len(plans):
            self._refuse("all requests", "no dict for each KV group")
            return [{} for _ in plans]
        sound: list[Reports] = []
        for group, (plan, given) in enumerate(zip(plans, reports)):
            sound.append({})
            for req_id in plan.report.keys() & given.keys():
                if (wrong := flaw(given[req_id], plan.report[req_id], held(group, req_id))) is None:
                    sound[-1][req_id] = given[req_id]
                else:
                    self._refuse(f"request {req_id}", wrong)
        return sound

    def _refuse(self, whose: str, wrong: str) -> None:
        if not self._said:
            self._said = True
            logger.error(
                "workers reported scores of %s with %s; expected a finite number for each resident block. Such scores "
                "count as missing. If the model's outputs are sound, please report this. Said once.",
                whose,
                wrong,
            )


def flaw(report: Any, names: frozenset[str], held: np.ndarray | None) -> str | None:
    """Tell the flaw of one request's report; None if the report has no flaw.

    Args:
        report: what came for the request.
        names: statistics that the plan asks for.
        held: int64 [n], logical blocks that need a number, ascending; if None, any blocks will do.
    """
    if not isinstance(report, Report) or not isinstance(report.statistics, dict):
        return f"the type {type(report).__name__}"
    index = report.index
    if not _is_list(index, "iu") or not len(index) or index[0] < 0 or not (index[1:] > index[:-1]).all():
        return "block numbers that do not ascend"
    for name in sorted(names):
        values = report.statistics.get(name)
        if not _is_list(values, "f") or len(values) != len(index):
            return f"no {name} for each of their blocks"
        if not np.isfinite(values).all():
            return f"a {name} that is no finite number"
    if held is not None and len(held):
        at = index.searchsorted(held)
        if at[-1] == len(index) or (index[at] != held).any():
            return "none for some of the blocks"
    return None


def _is_list(values: Any, kinds: str) -> TypeGuard[np.ndarray]:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds
