"""The table of docs/engine.md: what the scenarios came out as when the tests ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from support.scenarios import SCENARIOS, UPDATES, Scenario
from support.scenarios.core import RIGHT

LOUD = "loud"
BEGIN, END = "<!-- scenarios -->\n", "<!-- /scenarios -->\n"
HEAD = "| | scenario | replicated | sharded |\n|---|---|---|---|\n"
REMEDY = "`make scenarios` writes the table of docs/engine.md anew."


class Verdicts:
    """Collects what came out, and holds it against the document or writes it there.

    Args:
        document: has the table between its two comments.
        writing: whether the table is going to be written.
    """

    def __init__(self, document: Path, *, writing: bool) -> None:
        self.writing = writing
        self._document = document
        self._seen: dict[tuple[str, str], str] = {}

    def observe(self, identifier: str, update: str, outcomes: Sequence[str]) -> None:
        """Note what a scenario came out as on each rank: "right", or the text of an error."""
        verdict = _verdict(outcomes)
        assert self._seen.setdefault((identifier, update), verdict) == verdict, f"{identifier} is {outcomes} here"
        if not self.writing:
            documented = self._documented().get(identifier, ("nothing",) * 3)[1 + UPDATES.index(update)]
            assert verdict == documented, f"{identifier} is {verdict}, and {documented} in the document. {REMEDY}"

    def check_rows(self) -> None:
        """The document has a row for each scenario, with its title, and no other."""
        rows = {identifier: cells[0] for identifier, cells in self._documented().items()}
        assert rows == {scenario.identifier: scenario.title for scenario in SCENARIOS.values()}, REMEDY

    def write(self) -> None:
        """Put the table into the document; every scenario must have come out, in every update mode."""
        missing = {identifier for identifier, update in self._keys() if (identifier, update) not in self._seen}
        assert not missing, f"no table was written: nothing is known of {sorted(missing)}"
        before, _, after = self._parts()
        rows = "".join(self._row(scenario) for scenario in sorted(SCENARIOS.values(), key=_place))
        self._document.write_text(before + BEGIN + HEAD + rows + END + after, encoding="utf-8")

    def _keys(self) -> Iterable[tuple[str, str]]:
        return ((identifier, update) for identifier in SCENARIOS for update in UPDATES)

    def _row(self, scenario: Scenario) -> str:
        cells = (scenario.identifier, scenario.title, *(self._seen[scenario.identifier, update] for update in UPDATES))
        return f"| {' | '.join(cells)} |\n"

    def _documented(self) -> dict[str, tuple[str, ...]]:
        rows = (tuple(line.strip("| \n").split(" | ")) for line in self._parts()[1].removeprefix(HEAD).splitlines())
        return {identifier: tuple(cells) for identifier, *cells in rows}

    def _parts(self) -> tuple[str, str, str]:
        before, _, rest = self._document.read_text(encoding="utf-8").partition(BEGIN)
        table, _, after = rest.partition(END)
        return before, table, after


def _verdict(outcomes: Sequence[str]) -> str:
    right = [outcome == RIGHT for outcome in outcomes]
    assert all(right) or not any(right), outcomes
    return RIGHT if all(right) else LOUD


def _place(scenario: Scenario) -> tuple[str, int, str]:
    """In the order people count: A2, A2b, A10."""
    found = re.fullmatch(r"([A-F])(\d+)([a-z]?)", scenario.identifier)
    assert found is not None
    return found[1], int(found[2]), found[3]
