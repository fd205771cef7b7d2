from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.scenarios.table import Verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTION = "--write-scenarios"
DOCUMENT = Path(__file__).parents[2] / "docs/engine.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="write the table of scenarios in docs/engine.md anew")


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest) -> Iterator[Verdicts]:
    """What each scenario came out as: held against the document, or written there at the end."""
    collected = Verdicts(DOCUMENT, writing=request.config.getoption(OPTION, default=False))
    yield collected
    if collected.writing and not request.session.testsfailed:
        collected.write()
