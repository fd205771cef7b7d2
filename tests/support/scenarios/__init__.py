"""The situations of the table in docs/engine.md. Importing this registers them."""

from support.scenarios import optimizers, order, participation, reads, running, tensors
from support.scenarios.core import SCENARIOS, UPDATES, Loud, Scenario, Setting, outcome

__all__ = [
    "SCENARIOS",
    "UPDATES",
    "Loud",
    "Scenario",
    "Setting",
    "optimizers",
    "order",
    "outcome",
    "participation",
    "reads",
    "running",
    "tensors",
]
