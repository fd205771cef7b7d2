"""Situations in which engines like this one have gone wrong: the numbers are right, or every rank says what is wrong.

`pytest -k A1` runs scenario A1. What comes out is held against the table in docs/engine.md; `make scenarios` writes it.
"""

from dataclasses import dataclass

import pytest
from support.scenarios import SCENARIOS, UPDATES, Scenario, Setting, outcome


@dataclass(frozen=True)
class Case:
    """A scenario, its kind, what it is run with and on how many ranks."""

    scenario: Scenario
    kind: str | None
    setting: Setting
    world_size: int

    def __str__(self) -> str:
        """What `pytest -k` finds it by."""
        parts = [self.scenario.identifier, self.setting.update, str(self.setting.threshold_bytes)]
        ranks = [] if self.world_size == 2 else [f"{self.world_size} ranks"]
        return "-".join([*parts, *ranks, *([self.kind] if self.kind else [])])


CASES = [
    Case(scenario, kind, Setting(update, threshold_bytes), world_size)
    for scenario in SCENARIOS.values()
    if scenario.run is not None
    for kind in scenario.kinds or [None]
    for world_size in scenario.world_sizes
    for update in UPDATES
    for threshold_bytes in scenario.thresholds_on(world_size)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(ranks, verdicts, case):
    """Parameters and optimizer state equal a single process's, or every rank raises an error that names the cause."""
    scenario, update = case.scenario, case.setting.update
    outcomes = ranks(case.world_size).run(outcome, scenario.identifier, case.kind, case.setting)
    if update in scenario.loud:
        loud = scenario.loud[update]
        for text in outcomes:
            assert text.startswith(f"{loud.error.__name__}: ")
            assert loud.cause.format(kind=case.kind) in text
    else:
        assert outcomes == ["right"] * case.world_size
    verdicts.observe(scenario.identifier, update, outcomes)


def test_the_table_is_complete(verdicts):
    """The document's table lists the scenarios that there are."""
    if not verdicts.writing:
        verdicts.check_rows()
