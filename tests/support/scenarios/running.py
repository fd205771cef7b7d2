"""F: what happens while a run goes on: other thresholds, compilation, a single rank, faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    THRESHOLDS,
    Batch,
    Loud,
    Setting,
    Side,
    adamw,
    always,
    built,
    plain_loss,
    register,
    scenario,
    twins,
)
from torch import nn

import dear_engine as dear
from dear_tune.errors import CommunicationError, UnsupportedError


@scenario(
    "F1",
    "the threshold changes after every step for twenty steps",
    kinds={"three in turn": THRESHOLDS, "many": tuple(range(1, 4000, 200))},
    world_sizes=(2, 3),
    thresholds=(1500,),
)
def changing_threshold(setting: Setting, thresholds: Any) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(20):
            pair.train([step])
            pair.engine.optimizer.set_threshold(thresholds[step % len(thresholds)])
        pair.check()


REFUSED: dict[str, Callable[[Side], object]] = {
    "a threshold of nothing": lambda side: side.optimizer.set_threshold(0),
    "half a byte": lambda side: side.optimizer.set_threshold(1.5),
    "different thresholds": lambda side: side.optimizer.set_threshold(100 + side.ranks[0]),
    "parameters to clip": lambda side: side.optimizer.clip_grad_norm_(side.model.parameters(), 1.0),
    "a rank that there is not": lambda side: side.optimizer.consolidate_state_dict(to=99),
    "a stranger": lambda side: side.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
}


@scenario("F1b", "a call that is refused, and caught, leaves everything as it was: training goes on", kinds=REFUSED)
def refused(setting: Setting, call: Any) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        raised = False
        try:
            call(pair.engine)
        except UnsupportedError:
            raised = True
        assert raised
        assert pair.engine.optimizer.threshold_bytes == setting.threshold_bytes
        pair.train(range(2, 7))
        pair.check()


@scenario("F2", "accumulation of two micro-batches over ten steps: a bucket serves both of its collectives")
def accumulated(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(10):
            for side in pair:
                side.optimizer.zero_grad()
                with side.no_sync():
                    side.backward(2 * step)
                side.backward(2 * step + 1)
                side.optimizer.step()
        optimizer = pair.engine.optimizer
        assert optimizer.traffic.reduce_scatters == optimizer.traffic.all_gathers == 10 * len(optimizer.plan.buckets)
        pair.check()


register(
    "F3",
    "a rank raises, or is killed, at step 3: the others raise within the process group's timeout",
    loud=always(Loud(CommunicationError, "another rank")),
    thresholds=(1500,),
)


def faulty(setting: Setting, fault: str) -> None:
    """Train on a group with a short timeout, until the last rank raises and lives on, or is killed."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = built(MODELS["Perceptron"])
    optimizer = dear.DistributedOptimizer(
        adamw(model.parameters()),
        model,
        threshold_bytes=setting.threshold_bytes,
        update=setting.update,
        tuner=None,
        process_group=group,
    )
    side = Side(model, optimizer, (dist.get_rank(),))
    for step in range(20):
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            FAULTS[fault]()
        side.train(step)


def _raise() -> None:
    error = RuntimeError("a mistake of the user's")
    _kept.append(error)  # its traceback keeps the engine, and so the engine's connections
    raise error


_kept: list[Exception] = []
FAULTS = {"raises": _raise, "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL)}


def _compiled_model(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def _compiled_forward(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


COMPILED = {
    f"{name}, {when}": (compile_, when)
    for name, compile_ in (("torch.compile", _compiled_model), ("Module.compile", _compiled_forward))
    for when in ("before wrapping", "after wrapping", "after some steps")
}


@scenario("F4", "`torch.compile`, before and after the model is wrapped", kinds=COMPILED, thresholds=(1500,))
def compiled(setting: Setting, kind: Any) -> None:
    compile_, when = kind
    torch.compiler.reset()

    def build() -> nn.Module:
        model = MODELS["Perceptron"]()
        return compile_(model) if when == "before wrapping" else model

    with twins(setting, build, adamw) as pair:
        calls = {side.model: side.model for side in pair}
        if when == "after wrapping":
            calls = {model: compile_(model) for model in calls}
        pair.train(range(3), lambda model, batch: plain_loss(calls[model], batch))
        if when == "after some steps":
            calls = {model: compile_(model) for model in calls}
        pair.train(range(3, 6), lambda model, batch: plain_loss(calls[model], batch))
        pair.check()


@scenario("F4b", "a compiled function that uses a weight through a closure", thresholds=(1500,))
def compiled_closure(setting: Setting) -> None:
    torch.compiler.reset()

    def build() -> nn.Module:
        model = MODELS["Perceptron"]()
        weight = model[0].weight
        model.first = torch.compile(lambda x: nn.functional.linear(x, weight), backend="eager")
        return model

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model[4](model[3](model[2](model.first(batch.x)))).square().mean()

    with twins(setting, build, adamw) as pair:
        pair.train(range(STEPS), loss)
        pair.check()


@scenario(
    "F5",
    "one rank alone: the plain optimizer to the last bit, on the same path, without communication",
    kinds={name: MODELS[name] for name in ("Perceptron", "Functional", "Attention")},
    world_sizes=(1,),
)
def alone(setting: Setting, build: Any) -> None:
    with twins(setting, build, adamw) as pair:
        pair.train(range(STEPS))
        optimizer = pair.engine.optimizer
        assert optimizer.traffic.reduce_scatters == STEPS * len(optimizer.plan.buckets)
        assert optimizer.traffic.sent_bytes == 0
        pair.check()
        for mine, theirs in zip(pair.engine.model.parameters(), pair.oracle.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def _large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).float()  # 1 MB


@scenario("F6", "two hundred threshold changes: resident memory stays flat", thresholds=(1500,))
def memory(setting: Setting) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch.x.float().repeat(1, 22)[:, :256]).square().mean()

    with twins(setting, _large, adamw) as pair:
        sizes = []
        for change in range(200):
            pair.engine.train(change, loss)
            pair.engine.optimizer.set_threshold(2**16 + 2**17 * (change % 12))
            sizes.append(_resident_bytes())
        assert sizes[-1] - sizes[50] < 8 * 2**20  # one set of buffers a change would make it 150 MB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


register(
    "F7",
    "the tuning server is unreachable, dies, answers 500, late or garbage: training goes on as if untuned",
    thresholds=(2**20,),
)
