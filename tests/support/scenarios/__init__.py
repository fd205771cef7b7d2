"""The situations of the table in docs/engine.md. Importing this registers them."""

from support.scenarios import (  # noqa: F401
    gradients,
    optimizers,
    order,
    participation,
    pending,
    reads,
    running,
    several,
    states,
    tensors,
)
from support.scenarios.core import SCENARIOS, UPDATES, Loud, Scenario, Setting, outcome

__all__ = ["SCENARIOS", "UPDATES", "Loud", "Scenario", "Setting", "outcome"]
