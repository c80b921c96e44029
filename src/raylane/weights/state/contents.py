"""States of the contents of a reader's tensors. Pure."""

from __future__ import annotations

import enum

from raylane.errors import WeightsInvalidError

INITIAL = ("refuse", "allow")
"""Values of the option that decides on use before the first update."""


class ReaderState(enum.Enum):
    """State of a reader's tensors."""

    INITIAL = "initial"
    """As the reader made them."""
    VALID = "valid"
    """One whole version."""
    INVALID = "invalid"
    """Parts of two versions, because an update broke off while it wrote; or what `invalidate` was called for."""
    MISMATCH = "mismatch"
    """A version whose verification has failed."""


def check_initial(initial: str) -> None:
    """Raise ValueError for an unknown value of `initial`."""
    if initial not in INITIAL:
        raise ValueError(f"initial must be 'refuse' or 'allow', got {initial!r}")


def check_state(name: str, state: ReaderState, initial: str) -> None:
    """Raise WeightsInvalidError if the tensors of a reader hold no whole version; `initial` is one of `INITIAL`."""
    check_initial(initial)
    if state is ReaderState.INVALID:
        raise WeightsInvalidError(
            f"the tensors hold no whole version of {name!r}: an update broke off while it wrote, or invalidate() was "
            "called. Update again before the model is used"
        )
    if state is ReaderState.MISMATCH:
        raise WeightsInvalidError(
            f"the verification of a version of {name!r} has failed: tensors differ from those that were published. "
            "Update again before the model is used"
        )
    if state is ReaderState.INITIAL and initial == "refuse":
        raise WeightsInvalidError(
            f"the tensors hold no version of {name!r} yet. Update before the model is used, or accept its own weights "
            "with initial='allow'"
        )
