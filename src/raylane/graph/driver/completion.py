"""Completion of a result from the values of its execution: the output, or the first error in it. Pure."""

from __future__ import annotations

import logging
from typing import Any

from raylane.graph.driver.result import GraphResult
from raylane.graph.plan.ir import Plan
from raylane.graph.values import operations
from raylane.graph.values.failures import Failure

log = logging.getLogger("raylane.graph")


def complete_result(plan: Plan, result: GraphResult, values: list[Any]) -> None:
    """Complete a result from its values, unless it has failed before. Errors of leaves are logged and kept with it."""
    if plan.leaves:
        errors = []
        for value, task in plan.leaves:
            if type(values[value]) is Failure:
                errors.append(values[value].error)
                log.error(
                    "execution %d: %s failed; no output needs its result: %s",
                    result.number,
                    plan.labels[task],
                    errors[-1],
                )
        result.leaf_errors = tuple(errors)
    if result._done:
        return
    # The first error in the order of the output, so that the same failure gives the same error each time.
    for value in plan.output_values:
        if type(values[value]) is Failure:
            output, error = None, values[value].error
            break
    else:
        try:
            output, error = operations.evaluate(plan.output, values), None
        except Exception as failure:  # for example a gather of arrays whose shapes do not fit together
            output, error = None, failure
    result.complete(output, error)
