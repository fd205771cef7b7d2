"""The situations of the table in docs/engine.md. Importing this registers them, in the table's order."""

from support.scenarios import reads  # isort: skip
from support.scenarios import order  # isort: skip
from support.scenarios import participation  # isort: skip
from support.scenarios import optimizers  # isort: skip
from support.scenarios import tensors  # isort: skip
from support.scenarios import running  # isort: skip
from support.scenarios.core import SCENARIOS, Loud, Scenario, Setting, outcome

__all__ = [
    "SCENARIOS",
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
