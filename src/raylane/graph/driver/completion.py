"""From the values of one execution to its result: the output put together, or the first error in the way. Pure."""

from __future__ import annotations

import logging
from typing import Any

from raylane.graph.driver.result import Failed, GraphResult
from raylane.graph.plan.ir import Plan
from raylane.graph.values import operations as ops

log = logging.getLogger("raylane.graph")


def conclude(plan: Plan, result: GraphResult, values: list[Any]) -> None:
    """Complete a result from its values, unless it has failed before. Errors of leaves are logged and kept with it."""
    if plan.leaves:
        _report_leaves(plan, result, values)
    if result._done:
        return
    for value in plan.output_values:
        if type(values[value]) is Failed:
            output, error = None, values[value].error
            break
    else:
        try:
            output, error = ops.evaluate(plan.output, values), None
        except Exception as failure:  # such as a gather of values that do not fit together
            output, error = None, failure
    result.complete(output, error)


def _report_leaves(plan: Plan, result: GraphResult, values: list[Any]) -> None:
    errors = []
    for value, task in plan.leaves:
        if type(values[value]) is Failed:
            errors.append(values[value].error)
            log.error(
                "execution %d: %s failed, and nobody reads its result: %s", result.number, plan.labels[task], errors[-1]
            )
    result.leaf_errors = tuple(errors)
