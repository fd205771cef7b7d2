"""The wire contract, `/v1`: the single definition of every payload.

Requests forbid unknown fields, so that a misspelt one is refused; answers ignore them, also in what they repeat of a
request, so that an old client understands a newer service. All values are frozen. Units are in the names: `_bytes`,
`_s` (seconds). Numbers are finite; a number that is not known is null. Times are UTC.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "DEFAULT_THRESHOLD_BYTES",
    "LONGEST_ITERATION_S",
    "MAX_ITERATIONS_PER_REPORT",
    "SHORTEST_ITERATION_S",
    "Action",
    "Estimate",
    "Failure",
    "FieldError",
    "Fingerprint",
    "Gain",
    "Health",
    "Incumbent",
    "Instruction",
    "Layer",
    "Parameters",
    "Problem",
    "Recommendation",
    "Report",
    "Study",
    "StudyPage",
    "StudySpec",
    "StudyState",
    "StudyStatus",
    "SuggestRequest",
    "Trial",
    "TrialCounts",
    "TrialDetail",
    "TrialPage",
    "TrialState",
]

DEFAULT_THRESHOLD_BYTES = 25 * 2**20
"""Bytes: PyTorch DDP's default bucket size, and ours."""

MAX_ITERATIONS_PER_REPORT = 10_000

SHORTEST_ITERATION_S = 1e-9
"""Seconds: no machine has ever trained faster; a smaller number is a defect of the clock."""

LONGEST_ITERATION_S = 86_400.0
"""Seconds: a day."""

_MAX_BYTES = 2**50
_MAX_LAYERS = 20_000

_PositiveBytes = Annotated[int, Field(strict=True, ge=1, le=_MAX_BYTES)]
_Seconds = Annotated[float, Field(strict=True, ge=SHORTEST_ITERATION_S, le=LONGEST_ITERATION_S, allow_inf_nan=False)]
_FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
_StudyName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_WorkerId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]
_Label = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]+$")]
_Word = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00]+$")]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


def _known_fields(model: type[BaseModel]) -> BeforeValidator:
    """Lets an answer carry a request's model: of its fields, those that a newer service added are dropped first."""

    def drop_unknown(value: object) -> object:
        return {name: value[name] for name in model.model_fields if name in value} if isinstance(value, dict) else value

    return BeforeValidator(drop_unknown)


class StudyState(str, Enum):
    """Where a study stands."""

    WARMING_UP = "warming_up"  # the default and the first spread of thresholds are being measured
    EXPLORING = "exploring"  # the optimizer proposes
    CONVERGED = "converged"  # nothing left worth a trial
    PINNED = "pinned"  # a person fixed the recommendation
    PAUSED = "paused"  # a person stopped the search for now


class TrialState(str, Enum):
    """Where a trial stands."""

    QUEUED = "queued"  # waiting for a worker
    RUNNING = "running"  # a worker holds its lease
    COMPLETED = "completed"  # measured in full
    PRUNED = "pruned"  # cut short: clearly worse
    FAILED = "failed"  # the worker said why
    STALE = "stale"  # its worker fell silent past the lease


class Action(str, Enum):
    """What a worker does next."""

    MEASURE = "measure"  # run with the trial's parameters and report iteration times for it
    DONE = "done"  # nothing to measure: run with the recommendation


class Layer(_Request):
    """A module's directly owned parameters: the unit of fusion. Layers of different dtypes never share a bucket."""

    name: _Label
    bytes: _PositiveBytes
    dtype: _Word = "float32"


class Fingerprint(_Request):
    """What makes two training jobs comparable, beside their layers."""

    world_size: Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
    backend: _Word
    device: _Label
    dtype: _Word
    update: Literal["replicated", "sharded"] = "replicated"
    model: _Label | None = None


class Parameters(_Answer):
    """What a trial tries. Later knobs join as fields; clients ignore those they do not know."""

    threshold_bytes: _PositiveBytes


class StudySpec(_Request):
    """A study as a job asks for it. The first job's search settings (`seed`, `max_trials`, ...) stay."""

    name: _StudyName
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=_MAX_LAYERS)]
    fingerprint: Fingerprint
    default_threshold_bytes: _PositiveBytes = DEFAULT_THRESHOLD_BYTES
    minimum_threshold_bytes: _PositiveBytes = 1
    maximum_threshold_bytes: _PositiveBytes = _MAX_BYTES
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 0
    max_trials: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 30
    iterations_per_trial: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 20


class SuggestRequest(_Request):
    """A worker asks what to measure."""

    worker_id: _WorkerId


class Report(_Request):
    """One window of measurements for one trial. Sending it again, under the same sequence, changes nothing."""

    worker_id: _WorkerId
    sequence: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    iteration_times_s: Annotated[tuple[_Seconds, ...], Field(min_length=1, max_length=MAX_ITERATIONS_PER_REPORT)]


class Failure(_Request):
    """A worker could not measure its trial."""

    worker_id: _WorkerId
    reason: Annotated[str, Field(min_length=1, max_length=65_536, pattern=r"^[^\x00]+$")]


class Estimate(_Answer):
    """An iteration time, robustly: the median, and a 95 % confidence interval for the plan's at any other time."""

    median_s: _FiniteFloat
    low_s: _FiniteFloat
    high_s: _FiniteFloat
    iterations: int


class Gain(_Answer):
    """The share of the default's iteration time that the incumbent saves, with a 95 % confidence interval.

    Once both were measured again after the incumbent had been found, only those later trials count. Until then it is
    the gain of a plan picked for being fast, hence rather too large.
    """

    fraction: _FiniteFloat
    low: _FiniteFloat
    high: _FiniteFloat


class Incumbent(_Answer):
    """The best plan measured so far."""

    trial_number: int
    parameters: Parameters
    buckets: int
    iteration_time: Estimate


class TrialCounts(_Answer):
    """Trials by state."""

    queued: int = 0
    running: int = 0
    completed: int = 0
    pruned: int = 0
    failed: int = 0
    stale: int = 0


class StudyStatus(_Answer):
    """What every answer about a study says."""

    name: str
    state: StudyState
    state_reason: str
    """Why it is in that state, for people: "3 of 5 warm-up trials to go", or why the search stopped."""
    trials: TrialCounts
    max_trials: int
    distinct_plans: int
    default: Estimate | None
    """The default threshold's iteration time, over all of its trials."""
    incumbent: Incumbent | None
    gain: Gain | None


class Study(StudyStatus):
    """A study, whole."""

    layers: tuple[Annotated[Layer, _known_fields(Layer)], ...]
    fingerprint: Annotated[Fingerprint, _known_fields(Fingerprint)]
    default_threshold_bytes: int
    minimum_threshold_bytes: int
    maximum_threshold_bytes: int
    seed: int
    iterations_per_trial: int
    created_at: AwareDatetime
    last_heard_at: AwareDatetime | None


class Recommendation(_Answer):
    """What a job should run with now, and why."""

    parameters: Parameters
    buckets: int
    reason: str
    study: StudyStatus


class Trial(_Answer):
    """One set of parameters being measured."""

    study: str
    number: int
    state: TrialState
    parameters: Parameters
    buckets: int
    worker_id: str | None
    lease_expires_at: AwareDatetime | None
    next_sequence: int
    """The sequence that the worker's next report carries."""
    iterations_wanted: int
    iteration_time: Estimate | None
    failure_reason: str | None
    created_at: AwareDatetime
    finished_at: AwareDatetime | None


class TrialDetail(Trial):
    """A trial with its raw measurements, in the order they were reported."""

    iteration_times_s: tuple[float, ...]


class Instruction(_Answer):
    """The answer to a suggest and to a report: what the worker does next, in one round trip."""

    action: Action
    trial: Trial | None
    """The trial to measure; null when the action is "done"."""
    recommendation: Recommendation


class StudyPage(_Answer):
    """Studies, newest first."""

    studies: tuple[StudyStatus, ...]
    next_page_token: str | None


class TrialPage(_Answer):
    """Trials by number."""

    trials: tuple[Trial, ...]
    next_page_token: str | None


class Health(_Answer):
    """Liveness or readiness."""

    status: Literal["ok"]
    version: str
    time: AwareDatetime


class FieldError(_Answer):
    """What is wrong with one field of a request, by its path, such as `iteration_times_s[3]`."""

    field: str
    message: str


class Problem(_Answer):
    """An error, as RFC 9457 has it (`application/problem+json`)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: tuple[FieldError, ...] = ()
