"""An in-memory service for tests of training code: no server, no database, no waiting.

    service = FakeService(thresholds=[2**20, 2**22])
    client = Client("http://fake", transport=service)

It proposes the given thresholds in turn, one a trial, then says that it is done. What the training side sent is kept
for the test to look at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING

import httpx

from dear_tune import contract
from dear_tune.contract import TrialState
from dear_tune.fusion import PlanSpace, fuse

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["FakeService"]


class FakeService(httpx.BaseTransport):
    """A transport that answers like the service, for one study.

    Args:
        thresholds: what the trials try, in bytes.
        recommend: the threshold to recommend, in bytes; None: the study's default.

    Attributes:
        spec: the study that was created; None before.
        trials: the trials handed out, by number, with all iteration times reported.
        reports: every report received, repeated ones too.
        failures: every failure received.
        requests: method and path of every request received, refused ones too.
        down: while true, no connection comes about.
        status: while set, every answer is this HTTP status and nothing else.
        garbage: while true, every answer is HTTP 200 with a body that is no JSON.
    """

    def __init__(self, thresholds: Sequence[int] = (), *, recommend: int | None = None) -> None:
        self.spec: contract.StudySpec | None = None
        self.trials: list[contract.TrialDetail] = []
        self.reports: list[contract.Report] = []
        self.failures: list[contract.Failure] = []
        self.requests: list[tuple[str, str]] = []
        self.down = False
        self.status: int | None = None
        self.garbage = False
        self._thresholds = list(thresholds)
        self._recommend = recommend

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        self.requests.append((request.method, request.url.path))
        if self.down:
            raise httpx.ConnectError("the fake service is down", request=request)
        if self.status is not None:
            return httpx.Response(self.status)
        if self.garbage:
            return httpx.Response(200, text="<html>not a service</html>")
        return _response(self._answer(request.method, request.url.path, request.read()))

    def _answer(self, method: str, path: str, body: bytes) -> BaseModel:
        if path == "/v1/studies":
            return self._create(body) if method == "POST" else self._studies()
        number = int(found[1]) if (found := re.search(r"/trials/(\d+)", path)) else 0
        known = self.spec is not None and path.startswith(f"/v1/studies/{self.spec.name}")
        if not known or (found and number >= len(self.trials)):
            return _not_found(path)
        match method, re.sub(r"/\d+", "/N", path.removeprefix(f"/v1/studies/{self._created.name}")):
            case "GET", "":
                return self._study()
            case "GET", "/recommendation":
                return self._recommendation()
            case "GET", "/trials":
                return contract.TrialPage(trials=tuple(self.trials), next_page_token=None)
            case "GET", "/trials/N":
                return self.trials[number]
            case "POST", "/trials:suggest":
                return self._suggest(contract.SuggestRequest.model_validate_json(body).worker_id)
            case "POST", "/trials/N:report":
                return self._report(number, contract.Report.model_validate_json(body))
            case "POST", "/trials/N:fail":
                return self._fail(number, contract.Failure.model_validate_json(body))
        return _not_found(path)

    def _create(self, body: bytes) -> contract.Study:
        self.spec = self.spec or contract.StudySpec.model_validate_json(body)
        return self._study()

    def _suggest(self, worker_id: str) -> contract.Instruction:
        mine = (trial for trial in self.trials if trial.worker_id == worker_id and trial.state is TrialState.RUNNING)
        trial = next(mine, None)
        if trial is None and len(self.trials) < len(self._thresholds):
            trial = self._start(worker_id)
        action = contract.Action.MEASURE if trial else contract.Action.DONE
        return contract.Instruction(action=action, trial=trial, recommendation=self._recommendation())

    def _start(self, worker_id: str) -> contract.TrialDetail:
        number = len(self.trials)
        trial = contract.TrialDetail(
            study=self._created.name,
            number=number,
            state=TrialState.RUNNING,
            parameters=contract.Parameters(threshold_bytes=self._thresholds[number]),
            buckets=self._buckets(self._thresholds[number]),
            worker_id=worker_id,
            lease_expires_at=None,
            next_sequence=0,
            iterations_wanted=self._created.iterations_per_trial,
            iteration_time=None,
            failure_reason=None,
            created_at=_now(),
            finished_at=None,
            iteration_times_s=(),
        )
        self.trials.append(trial)
        return trial

    def _report(self, number: int, report: contract.Report) -> contract.Instruction:
        self.reports.append(report)
        trial = self.trials[number]
        if trial.state is TrialState.RUNNING and report.sequence == trial.next_sequence:
            self.trials[number] = _with_times(trial, trial.iteration_times_s + report.iteration_times_s)
        return self._suggest(report.worker_id)

    def _fail(self, number: int, failure: contract.Failure) -> contract.TrialDetail:
        self.failures.append(failure)
        update = {"state": TrialState.FAILED, "failure_reason": failure.reason, "finished_at": _now()}
        self.trials[number] = self.trials[number].model_copy(update=update)
        return self.trials[number]

    @property
    def _created(self) -> contract.StudySpec:
        assert self.spec is not None, "no study yet: routes check this first"
        return self.spec

    def _buckets(self, threshold_bytes: int) -> int:
        return len(fuse(self._created.layers, threshold_bytes).buckets)

    def _status(self) -> contract.StudyStatus:
        states = [trial.state for trial in self.trials]
        finished = len(self.trials) == len(self._thresholds) and TrialState.RUNNING not in states
        return contract.StudyStatus(
            name=self._created.name,
            state=contract.StudyState.CONVERGED if finished else contract.StudyState.EXPLORING,
            state_reason="the script has ended" if finished else "a script of thresholds",
            trials=contract.TrialCounts(**{state.value: states.count(state) for state in TrialState}),
            max_trials=len(self._thresholds),
            distinct_plans=len(PlanSpace.of(self._created).thresholds),
            default=None,
            incumbent=None,
            gain=None,
        )

    def _study(self) -> contract.Study:
        search = self._created.model_dump(exclude={"max_trials"})
        return contract.Study(**{**search, **self._status().model_dump()}, created_at=_now(), last_heard_at=_now())

    def _studies(self) -> contract.StudyPage:
        return contract.StudyPage(studies=(self._status(),) if self.spec else (), next_page_token=None)

    def _recommendation(self) -> contract.Recommendation:
        threshold = self._recommend or self._created.default_threshold_bytes
        return contract.Recommendation(
            parameters=contract.Parameters(threshold_bytes=threshold),
            buckets=self._buckets(threshold),
            reason="as the test wants it",
            study=self._status(),
        )


def _with_times(trial: contract.TrialDetail, times_s: tuple[float, ...]) -> contract.TrialDetail:
    """The trial after a report; completed once it has the iterations wanted."""
    completed = len(times_s) >= trial.iterations_wanted
    estimate = contract.Estimate(
        median_s=median(times_s), low_s=min(times_s), high_s=max(times_s), iterations=len(times_s)
    )
    update = {
        "state": TrialState.COMPLETED if completed else TrialState.RUNNING,
        "next_sequence": trial.next_sequence + 1,
        "iteration_time": estimate,
        "finished_at": _now() if completed else None,
        "iteration_times_s": times_s,
    }
    return trial.model_copy(update=update)


def _response(answer: BaseModel) -> httpx.Response:
    problem = isinstance(answer, contract.Problem)
    return httpx.Response(
        answer.status if isinstance(answer, contract.Problem) else 200,
        content=answer.model_dump_json(),
        headers={"content-type": "application/problem+json" if problem else "application/json"},
    )


def _not_found(path: str) -> contract.Problem:
    return contract.Problem(title="Not found", status=404, detail=f"The fake service has no {path}.")


def _now() -> datetime:
    return datetime.now(timezone.utc)
