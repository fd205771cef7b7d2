"""How a user says how a run is to be tuned, and the study that follows from it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dear_tune.client import Client
from dear_tune.contract import (
    DEFAULT_THRESHOLD_BYTES,
    MAX_ITERATIONS_PER_REPORT,
    Fingerprint,
    Layer,
    StudySpec,
    SuggestRequest,
)
from dear_tune.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Tuner", "study_name"]


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """How this job is tuned. The same on all ranks; rank 0's is what counts.

    Attributes:
        url: the tuning service, such as "http://tuner:8000".
        study: the study's name; None names it after the model and the cluster.
        worker_id: this job's name towards the service; None makes one of host and process. A job that restarts
            under the same name gets its open trial back.
        window: how many steps are measured between two exchanges among the ranks.
        settle: how many steps after a switch are not measured.
        start_up: how many steps at the beginning are not measured: caches, allocators and clocks are cold.
        iterations_per_trial: how many measured iterations make a trial, if this job creates the study.
        max_trials: after how many trials the search ends at the latest, if this job creates the study.
        seed: of the search, if this job creates the study.
    """

    url: str
    study: str | None = None
    worker_id: str | None = None
    window: int = 10
    settle: int = 3
    start_up: int = 10
    iterations_per_trial: int = 20
    max_trials: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_ITERATIONS_PER_REPORT or self.settle < 0 or self.start_up < 0:
            raise ConfigurationError(
                f"Tuner(...): window lies between 1 and {MAX_ITERATIONS_PER_REPORT}; "
                "settle and start_up are not negative."
            )
        Client(self.url).close()
        try:
            SuggestRequest(worker_id=self.worker_id or "worker")
            self.spec(_ANY_LAYERS, _ANY_CLUSTER, DEFAULT_THRESHOLD_BYTES)
        except ValidationError as error:
            raise ConfigurationError(f"Tuner(...): {_described(error)}") from error

    @classmethod
    def from_environment(cls) -> Tuner | None:
        """The tuner that `DEAR_TUNE_URL` and `DEAR_TUNE_STUDY` ask for; None if the first is not set."""
        url = os.environ.get("DEAR_TUNE_URL")
        return cls(url=url, study=os.environ.get("DEAR_TUNE_STUDY")) if url else None

    def spec(self, layers: Sequence[Layer], fingerprint: Fingerprint, default_threshold_bytes: int) -> StudySpec:
        """The study this job asks for."""
        return StudySpec(
            name=self.study or study_name(layers, fingerprint),
            layers=tuple(layers),
            fingerprint=fingerprint,
            default_threshold_bytes=default_threshold_bytes,
            iterations_per_trial=self.iterations_per_trial,
            max_trials=self.max_trials,
            seed=self.seed,
        )


_ANY_LAYERS = (Layer(name="any", bytes=1),)
_ANY_CLUSTER = Fingerprint(world_size=1, backend="any", device="any", dtype="any")


def _described(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())


def study_name(layers: Sequence[Layer], fingerprint: Fingerprint) -> str:
    """A name that the same model on the same cluster gets again: "gpt-4x-1f3a9c20"."""
    content = "".join(layer.model_dump_json() for layer in layers) + fingerprint.model_dump_json()
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    model = "".join(c for c in (fingerprint.model or "") if c.isascii() and c.isalnum()).lower() or "model"
    return f"{model[:64]}-{fingerprint.world_size}x-{digest}"
