"""What the demo shows at its end."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from dear_tune.cli.studies import recommendation_table, trials_table
from dear_tune.client import Client
from dear_tune.units import format_share

__all__ = ["TrainingResult", "print_report"]


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What the ranks found out.

    Attributes:
        steps: how many were trained on dear-tune.
        test_accuracy: of the trained network, between 0 and 1.
        compared_steps: how many losses were compared with DistributedDataParallel's.
        largest_loss_difference: among those.
    """

    steps: int
    test_accuracy: float
    compared_steps: int
    largest_loss_difference: float

    @property
    def losses_equal(self) -> bool:
        """Up to the rounding of sums in another order."""
        return self.largest_loss_difference < 1e-4


def print_report(console: Console, client: Client, study: str, result: TrainingResult) -> None:
    """Print the trials, the recommendation with the gain over the default, and what became of the training."""
    console.print(trials_table(client.trials(study)))
    console.print(recommendation_table(client.recommendation(study)))
    console.print(f"Test accuracy after {result.steps} steps: {format_share(result.test_accuracy)}")
    verdict = "equal to" if result.losses_equal else "DIFFERENT from"
    console.print(
        f"Loss: {verdict} DistributedDataParallel's on the same batches, at each of {result.compared_steps} steps "
        f"(largest difference {result.largest_loss_difference:.1g})"
    )
