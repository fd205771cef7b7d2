"""What is done with studies: get or create, look at, list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.exc import IntegrityError

from dear_service import answers, store
from dear_service.problems import conflict, not_found
from dear_tune.contract import FieldError, Layer, Recommendation, Study, StudyPage, StudySpec
from dear_tune.fusion import PlanSpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.orm import Session

    from dear_service.context import Context
    from dear_service.records import Snapshot, StudyRecord

__all__ = ["get_or_create", "page", "recommend", "require", "show", "snapshot"]

_NOTHING_YET = "no trial has been asked for yet"
_BOUNDS = ("default_threshold_bytes", "minimum_threshold_bytes", "maximum_threshold_bytes")


def get_or_create(context: Context, spec: StudySpec) -> tuple[Study, bool]:
    """The study of that name, and whether it was created by this call.

    Raises:
        ConflictError: the study exists for other layers, another cluster or other bounds.
        InvalidSpaceError: the bounds exclude each other or the default.
    """
    PlanSpace.of(spec)
    now = context.clock()
    try:
        with context.database.write() as session:
            found = store.find_study(session, spec.name)
            record = found or store.add_study(session, spec, reason=_NOTHING_YET, now=now)
            snapshot = store.snapshots(session, [record], now)[0]
    except IntegrityError:  # somebody else created it just now
        return get_or_create(context, spec)
    if differences := list(_differences(record.spec, spec)):
        raise conflict(f"The study {spec.name} exists, and is not of this job.", differences)
    return answers.study(snapshot), found is None


def show(context: Context, name: str) -> Study:
    """One study."""
    return answers.study(snapshot(context, name))


def recommend(context: Context, name: str) -> Recommendation:
    """What a job should run with now."""
    return answers.recommendation(snapshot(context, name))


def page(context: Context, *, before_id: int | None, size: int) -> StudyPage:
    """Studies, newest first; the page token is the last one's id."""
    with context.database.read() as session:
        records = store.study_page(session, before_id=before_id, size=size + 1)
        snapshots = store.snapshots(session, records[:size], context.clock())
    return StudyPage(
        studies=tuple(answers.status(snapshot) for snapshot in snapshots),
        next_page_token=str(records[size - 1].id) if len(records) > size else None,
    )


def snapshot(context: Context, name: str) -> Snapshot:
    """A study with all its trials; `NotFoundError` if there is none of that name."""
    with context.database.read() as session:
        return store.snapshots(session, [require(session, name)], context.clock())[0]


def require(session: Session, name: str) -> StudyRecord:
    """The study of that name; `NotFoundError` if there is none."""
    study = store.find_study(session, name)
    if study is None:
        raise not_found(f"There is no study {name}.")
    return study


def _differences(held: StudySpec, asked: StudySpec) -> Iterator[FieldError]:
    if held.layers != asked.layers:
        yield FieldError(field="layers", message=_first_difference(held.layers, asked.layers))
    ours, theirs = _comparable(held), _comparable(asked)
    for path, value in ours.items():
        if value != theirs[path]:
            yield FieldError(field=path, message=f"{value} in the study, {theirs[path]} in the request")


def _comparable(spec: StudySpec) -> dict[str, object]:
    """What makes two jobs' studies the same, beside the layers, by the field's path."""
    bounds = {name: getattr(spec, name) for name in _BOUNDS}
    return bounds | {f"fingerprint.{name}": value for name, value in spec.fingerprint}


def _first_difference(held: Sequence[Layer], asked: Sequence[Layer]) -> str:
    if len(held) != len(asked):
        return f"{len(held)} in the study, {len(asked)} in the request"
    differ = (
        f"layer {index}: {a} in the study, {b} in the request"
        for index, (a, b) in enumerate(zip(held, asked, strict=True))
        if a != b
    )
    return next(differ)
