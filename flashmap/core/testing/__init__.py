"""The conformance kit: does an implementation do what the reference says, also where engines have gone wrong before?

    from flashmap.core.testing import assert_conforms, cases, check

    for result in check(MyImplementation("mine"), "cuda"):    # or: flashmap check --impl mine
        print(result)

cases.py makes the inputs, check.py judges one call, device.py repeats calls: under graph capture, again, in another
order, on other streams.
"""

from flashmap.core.testing.cases import Case, build, cases
from flashmap.core.testing.check import Expected, Result, assert_conforms, check, check_case, compare, expected, run
from flashmap.core.testing.device import check_order, check_repeat, check_replay, check_streams

__all__ = [
    "Case",
    "Expected",
    "Result",
    "assert_conforms",
    "build",
    "cases",
    "check",
    "check_case",
    "check_order",
    "check_repeat",
    "check_replay",
    "check_streams",
    "compare",
    "expected",
    "run",
]
