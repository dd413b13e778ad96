"""`python -m tests.conformance.run FILE.json`: our numbers against a file of reference numbers.

One line per failing id (an id without a handler fails as unknown), then the deliberate differences
with their reasons, then `N passed, M failed`. Exit status 1 when one failed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.conformance import differences, handlers_advantage, handlers_data, handlers_loss
from tests.conformance.vectors import Case, load

__all__ = ["HANDLERS", "check", "compare", "main"]

HANDLERS = {**handlers_advantage.HANDLERS, **handlers_loss.HANDLERS, **handlers_data.HANDLERS}
ATOL = 1e-6  # the files' own: their reference holds float32 constants and adds 1e-8 to denominators


def compare(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place where `ours` lacks or differs from what `theirs` has; None: nowhere."""
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            if not isinstance(ours, dict) or key not in ours:
                return f"{where}{key}: missing"
            found = compare(ours[key], value, f"{where}{key}: ")
            if found:
                return found
        return None
    if isinstance(theirs, list) and theirs and not _is_number(theirs[0]):
        if len(ours) != len(theirs):
            return f"{where}{len(ours)} entries, expected {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((x for i, (a, b) in pairs if (x := compare(a, b, f"{where}[{i}]: "))), None)
    if isinstance(theirs, str):
        return None if ours == theirs else f"{where}{ours!r}, expected {theirs!r}"
    return _compare_numbers(_tensor(ours), _tensor(theirs), where)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().double()


def _compare_numbers(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> str | None:
    if ours.shape != theirs.shape:
        return f"{where}shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
    is_close = torch.isclose(ours, theirs, atol=ATOL, rtol=1e-9, equal_nan=True)
    if bool(is_close.all()):
        return None
    at = tuple((~is_close).nonzero()[0].tolist())
    return f"{where}{float(ours[at]):.9g} at {at}, expected {float(theirs[at]):.9g}"


def _normal(case: Case, outputs: Any) -> Any:
    """Parts of a partition have no order, and items of equal length are interchangeable."""
    if case.family != "seqlen_balanced":
        return outputs
    lengths = case.inputs["seqlen_list"]
    return {
        "lengths": sorted(sorted(lengths[i] for i in part) for part in outputs["partitions"]),
        "sums": sorted(outputs["sums"]),
        "covered": sorted(i for part in outputs["partitions"] for i in part),
    }


def check(case: Case) -> tuple[str | None, str | None]:
    """(what is wrong or None, reason of a deliberate difference or None)."""
    if case.family not in HANDLERS:
        return "unknown id: no feature of ours answers it", None
    expected, reason = case.outputs, None
    difference = differences.find(case)
    try:
        if difference is not None:
            right = difference.right(case)
            if compare(right, case.outputs) is not None:  # else the reference is right here
                expected, reason = right, difference.reason
                unexplained = difference.theirs and compare(difference.theirs(case), case.outputs)
                if unexplained:
                    return f"differs from the file for no listed reason: {unexplained}", None
        ours = HANDLERS[case.family](case)
        wrong = compare(_normal(case, ours), _normal(case, expected))
    except Exception as e:  # one broken id must not hide the others
        wrong = f"{type(e).__name__}: {e}"
    return wrong, None if wrong else reason


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tests.conformance.run FILE.json", file=sys.stderr)
        return 2
    cases = load(arguments[0])
    results = [(case.id, *check(case)) for case in cases]
    for name, wrong, _ in results:
        if wrong:
            print(f"FAILED {name}: {wrong}")
    reasons = [(name, reason) for name, _, reason in results if reason]
    if reasons:
        print(f"deliberately different, checked against the right answer ({len(reasons)}):")
        for name, reason in reasons:
            print(f"  {name}: {reason}")
    failed = sum(bool(wrong) for _, wrong, _ in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
