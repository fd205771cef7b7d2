"""What every operation of the service works with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dear_tune.tuning.gp import GaussianProcessOptimizer

if TYPE_CHECKING:
    from dear_service.database import Database
    from dear_service.records import StudyRecord
    from dear_tune.tuning.history import Optimizer

__all__ = ["Clock", "Context", "KeyedLocks", "OptimizerFactory", "gaussian_process", "utc_now"]

Clock = Callable[[], datetime]
OptimizerFactory = Callable[["StudyRecord"], "Optimizer"]


def utc_now() -> datetime:
    """The moment that it is."""
    return datetime.now(timezone.utc)


def gaussian_process(study: StudyRecord) -> Optimizer:
    """The tuning method of a study."""
    return GaussianProcessOptimizer(study.space, seed=study.spec.seed, max_trials=study.spec.max_trials)


class KeyedLocks:
    """A lock for each key, for as long as somebody holds or awaits it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Wait for the key's lock, and hold it during the block."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            yield


@dataclass(frozen=True, kw_only=True)
class Context:
    """The database, the clock, and how trials are handed out.

    Attributes:
        lease: how long a worker may hold a trial unheard.
        suggesting: by study; spares threads of this process the work of proposing the same trial. Nothing is wrong
            without it.
    """

    database: Database
    clock: Clock
    lease: timedelta
    new_optimizer: OptimizerFactory
    suggesting: KeyedLocks = field(default_factory=KeyedLocks)
