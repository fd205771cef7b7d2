from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from pydantic import BaseModel, ValidationError
from support.landscapes import FINGERPRINT

from dear_tune import contract
from dear_tune.contract import (
    Estimate,
    Fingerprint,
    Layer,
    Parameters,
    Report,
    Study,
    StudySpec,
    StudyState,
    TrialCounts,
)

MODELS = [
    value
    for name in contract.__all__
    if isinstance(value := getattr(contract, name), type) and issubclass(value, BaseModel)
]
STUDY = Study(
    name="study",
    state=StudyState.WARMING_UP,
    state_reason="no trial has been asked for yet",
    trials=TrialCounts(),
    max_trials=30,
    distinct_plans=1,
    default=None,
    incumbent=None,
    gain=None,
    layers=(Layer(name="a", bytes=1),),
    fingerprint=FINGERPRINT,
    default_threshold_bytes=1,
    minimum_threshold_bytes=1,
    maximum_threshold_bytes=1,
    seed=0,
    iterations_per_trial=20,
    created_at=datetime(2030, 1, 1, tzinfo=timezone.utc),
    last_heard_at=None,
)
REQUESTS = [contract.StudySpec, contract.SuggestRequest, contract.Report, contract.Failure, Layer, Fingerprint]


def report(times: str) -> str:
    """A report's JSON around these iteration times."""
    return f'{{"worker_id": "w", "sequence": 0, "iteration_times_s": {times}}}'


@pytest.mark.parametrize("model", MODELS)
def test_values_are_frozen(model: type[BaseModel]) -> None:
    """No payload can be changed after it was made."""
    assert model.model_config["frozen"]


@pytest.mark.parametrize("model", REQUESTS)
def test_requests_refuse_unknown_fields(model: type[BaseModel]) -> None:
    """A misspelt field is an error, not ignored."""
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        model.model_validate({"treshold": 1})


def test_answers_ignore_unknown_fields() -> None:
    """An old client reads a newer service's answer."""
    assert Parameters.model_validate({"threshold_bytes": 7, "eager_share": 0.5}) == Parameters(threshold_bytes=7)


def test_answers_ignore_unknown_fields_of_what_was_sent() -> None:
    """Also in the layers and the fingerprint that a study repeats, an old client skips what a newer service added."""
    answer = json.loads(STUDY.model_dump_json())
    answer["layers"][0]["rank"] = answer["fingerprint"]["topology"] = "new"
    assert Study.model_validate(answer) == STUDY
    assert Study.model_validate_json(json.dumps(answer)) == STUDY


@pytest.mark.parametrize("field", ["layers", "fingerprint"])
def test_studies_refuse_unknown_fields_within(field: str) -> None:
    """A misspelt field of a layer or of the fingerprint is an error, named by its place."""
    sent = json.loads(StudySpec(name="a", layers=STUDY.layers, fingerprint=FINGERPRINT).model_dump_json())
    (sent["layers"][0] if field == "layers" else sent["fingerprint"])["dtpye"] = "float16"
    with pytest.raises(ValidationError, match="Extra inputs are not permitted") as caught:
        StudySpec.model_validate_json(json.dumps(sent))
    assert caught.value.errors()[0]["loc"][-1] == "dtpye"


@pytest.mark.parametrize(
    "time", ["NaN", "Infinity", "-Infinity", "1e999", "-1.0", "0", "1e-300", "true", '"0.1"', "null", "9" * 5000]
)
def test_iteration_times_are_positive_numbers(time: str) -> None:
    """What is no number of a nanosecond to a day is refused, its place named (scikit-optimize 482, optuna 3206)."""
    with pytest.raises(ValidationError) as caught:
        Report.model_validate_json(report(f"[0.1, {time}]"))
    assert time == "9" * 5000 or caught.value.errors()[0]["loc"] == ("iteration_times_s", 1)


def test_iteration_times_are_never_none() -> None:
    """A report without a measurement is refused."""
    with pytest.raises(ValidationError, match="at least 1 item"):
        Report.model_validate_json(report("[]"))


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "..", "a" * 129, "a\n"])
def test_study_names_fit_into_a_path(name: str) -> None:
    """A name that would need quoting in an address is refused."""
    with pytest.raises(ValidationError):
        StudySpec(name=name, layers=(Layer(name="a", bytes=1),), fingerprint=FINGERPRINT)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4", 2**50 + 1])
def test_sizes_are_whole_bytes(size: object) -> None:
    """A layer's size is a positive integer, of at most a pebibyte."""
    with pytest.raises(ValidationError):
        Layer.model_validate({"name": "a", "bytes": size})


def test_numbers_out_are_finite() -> None:
    """An estimate that is not finite cannot be made, so none is ever sent."""
    with pytest.raises(ValidationError, match="finite"):
        Estimate(median_s=float("nan"), low_s=0.1, high_s=0.2, iterations=1)


def test_a_spec_survives_json() -> None:
    """What a job sends is what the service reads."""
    spec = StudySpec(name="gpt-small", layers=(Layer(name="a", bytes=1),), fingerprint=FINGERPRINT)
    assert StudySpec.model_validate(json.loads(spec.model_dump_json())) == spec
