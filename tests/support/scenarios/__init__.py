"""The situations of docs/engine.md's table, each a function that every rank runs. Importing this registers them all."""

from support.scenarios import order, participation, reads
from support.scenarios.core import SCENARIOS, Loud, Scenario, Setting, outcome

__all__ = [
    "SCENARIOS",
    "Loud",
    "Scenario",
    "Setting",
    "outcome",
    "reads",
]
