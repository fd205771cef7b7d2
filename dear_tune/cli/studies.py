"""`studies`, `trials` and `show`: what the service knows, as tables for people or JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dear_tune.client import Client
from dear_tune.units import format_bytes, format_estimate, format_gain, printable

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dear_tune.contract import Estimate, Recommendation, StudyStatus, Trial, TrialCounts

__all__ = ["recommendation_table", "show", "studies", "trials", "trials_table"]

UrlOption = Annotated[str, typer.Option("--url", envvar="DEAR_TUNE_URL", help="Where the service listens.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
StudyArgument = Annotated[str, typer.Argument(help="The study's name.")]

_LOCAL = "http://127.0.0.1:8000"
_UNKNOWN = "-"
_PIPE_WIDTH = 240  # characters: whatever reads a pipe wants a row a line


def studies(url: UrlOption = _LOCAL, as_json: JsonOption = False) -> None:
    """List the studies, newest first."""
    with Client(url) as client:
        found = list(client.studies())
    if as_json:
        _print_json(found)
        return
    table = _table("study", "state", "trials", "default", "incumbent", "gain")
    for study in found:
        table.add_row(*_texts(_study_row(study)))
    _print(table)


def trials(study: StudyArgument, url: UrlOption = _LOCAL, as_json: JsonOption = False) -> None:
    """List a study's trials, by number."""
    with Client(url) as client:
        found = list(client.trials(study))
    if as_json:
        _print_json(found)
        return
    _print(trials_table(found))
    for trial in found:
        if trial.failure_reason:
            _print(Text(printable(f"Trial {trial.number} failed: {trial.failure_reason}")))


def show(study: StudyArgument, url: UrlOption = _LOCAL, as_json: JsonOption = False) -> None:
    """Show where a study stands, and what a job should run with now."""
    with Client(url) as client:
        recommendation = client.recommendation(study)
    if as_json:
        typer.echo(recommendation.model_dump_json(indent=2))
        return
    _print(recommendation_table(recommendation))


def trials_table(found: Iterable[Trial]) -> Table:
    """Trials, one a row."""
    table = _table("trial", "state", "threshold", "buckets", "iteration time", "iterations", "worker")
    for trial in found:
        table.add_row(*_texts(_trial_row(trial)))
    return table


def recommendation_table(recommendation: Recommendation) -> Table:
    """A recommendation, and where its study stands, one fact a row."""
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(recommendation):
        table.add_row(*_texts((name, value)))
    return table


def _study_row(study: StudyStatus) -> tuple[str, ...]:
    incumbent = study.incumbent
    return (
        study.name,
        study.state.value,
        _count(study.trials),
        _time(study.default),
        format_bytes(incumbent.parameters.threshold_bytes) if incumbent else _UNKNOWN,
        format_gain(study.gain) if study.gain else _UNKNOWN,
    )


def _trial_row(trial: Trial) -> tuple[str, ...]:
    return (
        str(trial.number),
        trial.state.value,
        format_bytes(trial.parameters.threshold_bytes),
        str(trial.buckets),
        _time(trial.iteration_time),
        str(trial.iteration_time.iterations if trial.iteration_time else 0),
        trial.worker_id or _UNKNOWN,
    )


def _lines(recommendation: Recommendation) -> Iterable[tuple[str, str]]:
    study = recommendation.study
    yield "study", study.name
    yield "state", f"{study.state.value}: {study.state_reason}"
    yield "trials", f"{_count(study.trials)}; at most {study.max_trials}, over {study.distinct_plans} distinct plans"
    yield "default", _time(study.default)
    if study.incumbent:
        threshold = format_bytes(study.incumbent.parameters.threshold_bytes)
        yield (
            "incumbent",
            f"{_time(study.incumbent.iteration_time)} at {threshold}, {_buckets(study.incumbent.buckets)}",
        )
    yield "gain", format_gain(study.gain) if study.gain else _UNKNOWN
    threshold = format_bytes(recommendation.parameters.threshold_bytes)
    yield "recommendation", f"{threshold}, {_buckets(recommendation.buckets)}: {recommendation.reason}"


def _buckets(count: int) -> str:
    return f"{count} bucket" if count == 1 else f"{count} buckets"


def _count(counts: TrialCounts) -> str:
    by_state = (f"{count} {state}" for state, count in counts.model_dump().items() if count)
    return ", ".join(by_state) or "none"


def _time(estimate: Estimate | None) -> str:
    return format_estimate(estimate) if estimate else _UNKNOWN


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)  # what names the row is there to be copied
    return table


def _texts(values: Iterable[str]) -> Iterable[Text]:
    """As plain text: names and reasons come from elsewhere, and may look like markup."""
    return (Text(printable(value)) for value in values)


def _print(table: Table | Text) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(table)


def _print_json(values: Iterable[BaseModel]) -> None:
    typer.echo(json.dumps([value.model_dump(mode="json") for value in values], indent=2))
