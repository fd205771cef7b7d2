"""Simulated studies: how long an iteration takes with each plan, and noisy measurements of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dear_tune.contract import DEFAULT_THRESHOLD_BYTES, Fingerprint, Layer, StudySpec, TrialState
from dear_tune.fusion import FusionPlan, PlanSpace, fuse
from dear_tune.tuning.history import Observation, Optimizer

FINGERPRINT = Fingerprint(world_size=2, backend="gloo", device="cpu", dtype="float32")


def spec_of(*layer_bytes: int, default: int = DEFAULT_THRESHOLD_BYTES, **settings: int) -> StudySpec:
    """A study of layers of these sizes."""
    layers = tuple(Layer(name=f"layer{index}", bytes=size) for index, size in enumerate(layer_bytes))
    return StudySpec(name="study", layers=layers, fingerprint=FINGERPRINT, default_threshold_bytes=default, **settings)


def space_of(*layer_bytes: int, default: int = DEFAULT_THRESHOLD_BYTES, **settings: int) -> PlanSpace:
    """The plans of layers of these sizes."""
    return PlanSpace.of(spec_of(*layer_bytes, default=default, **settings))


def completed(threshold_bytes: int, *times_s: float) -> Observation:
    """A completed trial."""
    return Observation(threshold_bytes=threshold_bytes, state=TrialState.COMPLETED, iteration_times_s=times_s)


def tune(
    optimizer: Optimizer, measure: Callable[[int], Sequence[float]], start: Sequence[Observation] = ()
) -> list[Observation]:
    """Run a study to its end with one worker."""
    history = list(start)
    for _ in range(100):
        proposal = optimizer.suggest(history)
        if proposal.threshold_bytes is None:
            return history
        history.append(completed(proposal.threshold_bytes, *measure(proposal.threshold_bytes)))
    raise AssertionError("the study does not end")


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """The true iteration time of each plan, in seconds, and the noise around it.

    Attributes:
        spread: the standard deviation of a trial's iterations, as a share of the iteration time.
        drift: that of the trials of one plan, which no number of iterations averages out.
    """

    space: PlanSpace
    times_s: tuple[float, ...]
    spread: float = 0.05
    drift: float = 0.0

    def slowdown(self, threshold_bytes: int) -> float:
        """How much slower than the best plan, as a share."""
        return self.times_s[self.space.index(threshold_bytes)] / min(self.times_s) - 1

    def measure(self, threshold_bytes: int, rng: np.random.Generator, *, iterations: int = 20) -> tuple[float, ...]:
        """Lognormal noise, and one iteration in fifty half as slow again."""
        time = self.times_s[self.space.index(threshold_bytes)] * np.exp(rng.normal(0, self.drift))
        times = time * np.exp(rng.normal(0, self.spread, iterations))
        return tuple(float(each) for each in np.where(rng.random(iterations) < 0.02, 1.5 * times, times))


def transformer(alpha_s: float, beta_s_per_byte: float) -> Landscape:
    """A transformer of 38 MB on a network whose all-reduce costs alpha + beta * bytes, trained on the DeAR schedule."""
    block = (2048, 789_504, 263_168, 2048, 1_052_672, 1_049_600)
    sizes = (512 * 4096, 131_072, *(block * 8), 2048)
    spec = spec_of(*sizes)
    space = PlanSpace.of(spec)
    plans = [fuse(spec.layers, threshold) for threshold in space.thresholds]
    compute = np.sqrt(sizes) / np.sum(np.sqrt(sizes))
    times = [_pipeline(plan, sizes, 0.03 * compute, alpha_s / 2, beta_s_per_byte / 2) for plan in plans]
    return Landscape(space=space, times_s=tuple(times))


def _pipeline(plan: FusionPlan, sizes: Sequence[int], forward: np.ndarray, alpha: float, beta: float) -> float:
    """Reduce-scatters in backward as gradients come, all-gathers in the next forward as layers need them."""
    costs = [alpha + beta * sum(sizes[layer] for layer in bucket) for bucket in plan.buckets]
    gradient_at = np.cumsum(2 * forward[::-1])[::-1]
    link = 0.0
    for bucket, cost in zip(reversed(plan.buckets), reversed(costs), strict=True):
        link = max(link, gradient_at[bucket[0]]) + cost
    link = now = max(link, float(gradient_at[0]))
    for bucket, cost in zip(plan.buckets, costs, strict=True):
        link += cost
        now = max(now, link) + float(np.sum(forward[list(bucket)]))
    return now
