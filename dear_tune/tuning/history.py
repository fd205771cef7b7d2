"""What the tuning method sees of a study, and what it answers: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dear_tune.contract import StudyState, TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Observation", "Optimizer", "Proposal"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One trial, as far as it has come.

    Attributes:
        threshold_bytes: what it tries.
        state: queued and running trials hold their plan; failed ones forbid it; stale ones leave it free.
        iteration_times_s: the slowest rank's time of each measured iteration, in seconds.
    """

    threshold_bytes: int
    state: TrialState
    iteration_times_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What to do next.

    Attributes:
        threshold_bytes: the next trial's threshold; None when nothing is worth a trial now.
        state: the state that the study is in by this proposal.
        reason: why, for people.
    """

    threshold_bytes: int | None
    state: StudyState
    reason: str


class Optimizer(Protocol):
    """A tuning method over one study's plans."""

    def suggest(self, history: Sequence[Observation]) -> Proposal:
        """The next step, from the trials so far by number; the same history gives the same answer."""
        ...
