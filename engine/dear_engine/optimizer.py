"""What users touch: `DistributedOptimizer`, three changed lines in a training script."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import ValidationError

from dear_engine.agreement import Settings, agree, start_equal
from dear_engine.barrier import check_countable, plainly
from dear_engine.collectives import Channel, Traffic, check_backend, collectives_for
from dear_engine.conversation import ServiceThread
from dear_engine.hooks import hang_on
from dear_engine.layers import dtype_name, parameters_of
from dear_engine.probe import check_separate
from dear_engine.requirements import (
    check_arguments,
    check_free,
    check_optimizer,
    check_threshold,
    check_trainable,
    refuse_to_step,
)
from dear_engine.schedule import Schedule, belongs_to_a_schedule
from dear_engine.sharded import Sharded
from dear_engine.timing import IterationTimer, clock_for
from dear_engine.tuner import Tuner
from dear_engine.tuning import TuningLoop
from dear_engine.update import Replicated, check_hooks
from dear_tune.client import Client
from dear_tune.contract import DEFAULT_THRESHOLD_BYTES, Fingerprint
from dear_tune.errors import DearTuneError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from dear_engine.sharded import FullState
    from dear_tune.fusion import FusionPlan

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger("dear_engine")

_alive: weakref.WeakSet[Schedule] = weakref.WeakSet()


def _synchronize_all() -> None:
    for schedule in list(_alive):
        with suppress(DearTuneError):  # what has failed has been raised already, or is where the child reads
            schedule.synchronize()


os.register_at_fork(before=_synchronize_all)  # the child has no thread that could

_ORDER_KNOWN_AFTER = 2  # steps: the first leaves updates pending, the second's forward reads them


class DistributedOptimizer(torch.optim.Optimizer):
    """Data-parallel training on the DeAR schedule: wraps an optimizer, and hooks into the model it steps.

    All ranks of the process group construct it together, with the same model and optimizer; parameters and buffers
    start as rank 0's. Between `step()` and the next forward, updates are pending: they are applied when a parameter
    is first read, by whatever name. Gradients in `.grad` are this rank's own, and must not be changed between
    `backward()` and `step()`.

    Args:
        optimizer: any `torch.optim` optimizer that steps its parameters independently of each other.
        model: owns all of the optimizer's parameters.
        threshold_bytes: the fusion threshold, in bytes, to begin with; with a tuner the default it must beat.
        tuner: how the threshold is tuned; "environment": by `DEAR_TUNE_URL` if that is set; None: not at all.
        update: "replicated": every rank steps all parameters. "sharded": every rank steps its own part of each, and
            keeps the optimizer's state of that part only; for optimizers that treat every element on its own.
        communication_dtype: what gradients are communicated in, such as torch.bfloat16; None for the parameters' own.
        process_group: the ranks that train together; None for all.

    Raises:
        UnsupportedError: before anything is changed, for what the engine would get wrong.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        threshold_bytes: int = DEFAULT_THRESHOLD_BYTES,
        tuner: Tuner | Literal["environment"] | None = "environment",
        update: Literal["replicated", "sharded"] = "replicated",
        communication_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_arguments(optimizer, model, threshold_bytes, tuner, update, communication_dtype)
        if not dist.is_initialized():
            raise UnsupportedError("Call torch.distributed.init_process_group() before DistributedOptimizer(...).")
        group = process_group or dist.group.WORLD
        assert group is not None  # it is initialized
        if dist.get_rank(group) < 0:
            raise UnsupportedError("This process is not a member of process_group; only its members train with it.")
        check_countable()
        check_optimizer(optimizer)
        owned = parameters_of(model, optimizer)
        self._device = check_trainable(owned)
        check_backend(group, self._device)
        tuner = Tuner.from_environment() if tuner == "environment" else tuner
        wanted = Settings(
            threshold_bytes=threshold_bytes, tuner=tuner, update=update, communication_dtype=communication_dtype
        )
        self._optimizer = optimizer
        self._model = model
        self._group = group
        # As an optimizer that is restored from a pickle sets itself up, without parameter groups of its own.
        self.__setstate__({"defaults": dict(optimizer.defaults)})
        with ExitStack() as undo:  # whatever happens: no group, thread or hook is to be left behind
            self._channel = Channel(group)
            undo.callback(self._channel.close)
            self._settings = agree(self._channel, model, optimizer, wanted)
            self._sharded = Sharded(optimizer, self._channel) if self._settings.update == "sharded" else None
            self._collectives = collectives_for(group, self._device, self._channel)
            self._schedule = Schedule(
                owned,
                optimizer,
                self._collectives,
                self._sharded or Replicated(optimizer, self._channel.rank, self._channel.world_size),
                self._channel,
                threshold_bytes=self._settings.threshold_bytes,
                wire_dtype=self._settings.communication_dtype,
            )
            undo.callback(self._schedule.close)
            start_equal([*model.parameters(), *model.buffers()], group)
            if self._sharded is not None:
                self._sharded.take_over()
            self._schedule.start()
            self._timer = IterationTimer(clock_for(self._device))
            self._step_hook = optimizer.register_step_pre_hook(refuse_to_step)
            undo.callback(self._step_hook.remove)
            # Also whoever goes to the wrapped optimizer gets its latest state, and does not restore under an update.
            self._other_hooks = [
                optimizer.register_state_dict_pre_hook(lambda _: self._before_state_dict()),
                optimizer.register_load_state_dict_pre_hook(lambda _, __: self._schedule.synchronize()),
                optimizer.register_load_state_dict_post_hook(lambda _: self._after_load_state_dict()),
                *hang_on(model, update=self._update_parameters_of, interrupt=self._timer.interrupt),
            ]
            undo.pop_all()
        _alive.add(self._schedule)
        self._closed = False
        self._consolidated: FullState | None = None
        self._consolidate_first = False
        self._tuning: TuningLoop | None = None
        self._until_order = _ORDER_KNOWN_AFTER
        self._known = _ids(optimizer)

    # Both read-only on purpose: they are always the wrapped optimizer's.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state, by parameter, with all pending updates applied; sharded: of this rank's parts."""
        self._schedule.synchronize()
        return self._optimizer.state if self._sharded is None else self._sharded.state

    @property
    def threshold_bytes(self) -> int:
        """The fusion threshold in force, in bytes; see `set_threshold`."""
        return self._schedule.fusion.plan.threshold_bytes

    @property
    def plan(self) -> FusionPlan:
        """The fusion plan in force."""
        return self._schedule.fusion.plan

    @property
    def tuning(self) -> bool:
        """Whether thresholds are being tried, or will be; the same on all ranks at the same step."""
        return self._settings.tuner is not None if self._tuning is None else self._tuning.measuring

    @property
    def traffic(self) -> Traffic:
        """How many collectives this rank has started, and how many bytes it has sent in them."""
        return self._collectives.traffic

    @torch.compiler.disable  # type: ignore[untyped-decorator] # not annotated in torch
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Hand the updates over: each is applied before the first read of its parameters.

        Args:
            closure: evaluates the model anew and returns the loss, as for any optimizer.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_step()
        self._schedule.step()
        self._consolidated = None
        if self._consolidate_first:
            self.consolidate_state_dict()
            self._consolidate_first = False  # also if this optimizer never has any
        # Schedulers that were built on the wrapped optimizer look there whether it has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._until_order:
            self._approach_order()
        elif self._tuning is not None:
            self._fuse(self._tuning.after_step(self.threshold_bytes))
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator] # as above
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the mean gradients by their total norm, between `backward()` and `step()`; all ranks call it.

        As `torch.nn.utils.clip_grad_norm_`, over all parameters of this optimizer, from the shards that the ranks hold
        and one number from each. What is in `.grad` stays as it is.

        Args:
            max_norm: the largest norm that is left alone.
            norm_type: p of the p-norm; infinity for the largest element.
            error_if_nonfinite: raise `RuntimeError` if the norm is not finite.

        Returns:
            The norm before clipping, the same on all ranks: ().
        """
        self._check_open()
        if not isinstance(max_norm, (int, float, torch.Tensor)):
            raise UnsupportedError(
                "optimizer.clip_grad_norm_(max_norm) clips all of its own parameters: pass the norm."
            )
        if not norm_type > 0:
            raise UnsupportedError(f"norm_type={norm_type!r}: the p of a p-norm is above 0.")
        return self._schedule.clip(float(max_norm), float(norm_type), error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as any optimizer does; pending updates stay pending."""
        with plainly():  # it looks at no parameter's values, and there are many
            super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the backward passes inside; the first one outside communicates the sum.

        It saves communication: without it each backward pass communicates, and all but the last in vain.
        """
        before, self._schedule.reducing = self._schedule.reducing, False
        try:
            yield
        finally:
            self._schedule.reducing = before

    def synchronize(self) -> None:
        """Apply all pending updates now. Done for you wherever a parameter is read."""
        self._schedule.synchronize()

    def set_threshold(self, threshold_bytes: int) -> None:
        """Fuse anew by another threshold, in bytes, after a step. All ranks do it after the same one.

        Raises:
            UnsupportedError: a tuner sets the threshold.
            GradientError: gradients are there that no step has used yet.
        """
        self._check_open()
        check_threshold(threshold_bytes)
        if self._settings.tuner is not None:
            raise UnsupportedError(
                "The tuner sets the threshold of this run; build it with tuner=None to set your own."
            )
        self._fuse(threshold_bytes)

    def consolidate_state_dict(self, to: int | None = None) -> None:
        """Gather what `state_dict()` then gives; all ranks call it together. Needed for the sharded update only.

        Where there is no state yet, it is gathered after the first step: torch.distributed.checkpoint makes one, with
        gradients of zero, to have something to load into.

        Args:
            to: the rank, within the process group, that is going to save; None for all.
        """
        self._check_open()
        if to is not None and to not in range(self._channel.world_size):
            raise UnsupportedError(f"consolidate_state_dict(to={to!r}): a rank of {self._channel.world_size}, or None.")
        self._schedule.synchronize()
        self._schedule.finish_round()
        if self._sharded is not None:
            self._consolidated = self._sharded.gather(to)
            self._consolidate_first = not self._sharded.state

    def state_dict(self) -> dict[str, Any]:
        """The state with all pending updates applied, as a plain optimizer's: plain PyTorch loads it, and vice versa.

        Raises:
            UnsupportedError: the update is sharded, and `consolidate_state_dict()` was not called since the last step.
        """
        if self._sharded is None or self._consolidated is None:
            return self._optimizer.state_dict()
        return self._sharded.state_dict(self._consolidated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a plain optimizer's state, or one of this class's, at any world size; all ranks load the same."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more of the model's parameters; all ranks call it together. They start as rank 0's.

        Raises:
            UnsupportedError: the model does not have them, or the engine would get them wrong; nothing has changed.
        """
        self._check_open()
        self._timer.interrupt()
        self._schedule.synchronize()
        self._schedule.finish_round()
        before = len(self.param_groups)
        self._optimizer.add_param_group(param_group)
        try:
            owned = parameters_of(self._model, self._optimizer)
            added = self.param_groups[before]["params"]
            check_free({name: p for each in owned.values() for name, p in each.items() if p in set(added)})
            agree(self._channel, self._model, self._optimizer, self._settings)
            check_separate(self._optimizer)
            if self._sharded is not None:
                self._sharded.check()
            self._schedule.own(owned)
        except Exception:  # whatever it was: nothing is to have changed
            del self.param_groups[before:]
            raise
        start_equal(added, self._group)
        self._until_order = _ORDER_KNOWN_AFTER
        self._known = _ids(self._optimizer)

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse to be copied or pickled: `UnsupportedError`."""
        raise UnsupportedError("A DistributedOptimizer cannot be copied or pickled; save its state_dict().")

    def close(self) -> None:
        """Apply what is pending, stop tuning, and give the model back as it was. All ranks call it.

        An engine that is not closed lives as long as the process.

        Gradients that no step has used stay in `.grad`, as this rank's own. After a sharded update the wrapped
        optimizer goes on only if its state has been consolidated since the last step; otherwise it refuses to, until
        it is given a state by `load_state_dict`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._schedule.close()
        finally:
            for hook in self._other_hooks:
                hook.remove()
            if self._tuning is not None:
                self._tuning.close()
            self._give_back()
            self._channel.close()

    def _give_back(self) -> None:
        if self._sharded is None or not self._sharded.state:
            self._step_hook.remove()
        elif self._consolidated is not None:
            self._step_hook.remove()
            self._optimizer.load_state_dict(self.state_dict())
        else:
            hook = self._step_hook
            self._optimizer.register_load_state_dict_post_hook(lambda _: hook.remove())

    def _fuse(self, threshold_bytes: int) -> None:
        if threshold_bytes != self.threshold_bytes:
            self._schedule.fuse(threshold_bytes)

    def _check_step(self) -> None:
        """Refuse what has become wrong since the engine was built."""
        self._check_open()
        check_hooks(self._optimizer, self._step_hook)
        if _ids(self._optimizer) != self._known:
            raise UnsupportedError(
                "The wrapped optimizer was given other parameters. Call add_param_group() of the DistributedOptimizer, "
                "or close() it and build a new one."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise UnsupportedError(
                "This DistributedOptimizer is closed; step the wrapped optimizer, or build a new one."
            )

    def _before_state_dict(self) -> None:
        self._timer.interrupt()
        self._schedule.synchronize()
        if self._sharded is not None and self._sharded.state and not self._optimizer.state:
            raise UnsupportedError(
                "The optimizer's state is sharded over the ranks: call optimizer.consolidate_state_dict() on all ranks "
                "after the last step, then state_dict() of the DistributedOptimizer."
            )

    def _after_load_state_dict(self) -> None:
        self._consolidated = None
        if self._sharded is not None:
            self._sharded.take_over()

    def _update_parameters_of(self, module: nn.Module) -> None:
        self._schedule.read(module.parameters())

    def _approach_order(self) -> None:
        """The order in which forward reads the layers: fuse in that one, all ranks in rank 0's."""
        self._until_order -= 1
        if self._until_order:
            self._warn_of_strays()
            self._schedule.record()
            return
        everyone = self._channel.all_gather_object(self._schedule.recorded(), "the order of layers")
        self._schedule.reorder(everyone[0])
        if self._settings.tuner is not None and self._tuning is None:
            self._tuning = self._tuning_loop(self._settings.tuner)

    def _warn_of_strays(self) -> None:
        with plainly():
            strays = [
                name
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None and not belongs_to_a_schedule(parameter)
            ]
        if strays:
            logger.warning(
                "%d of the model's parameters have gradients and belong to no DistributedOptimizer (the first is %s): "
                "their gradients are not averaged over the ranks. If another optimizer steps them, wrap that one too.",
                len(strays),
                strays[0],
            )

    def _tuning_loop(self, tuner: Tuner) -> TuningLoop | None:
        layers = [layer.layer for layer in self._schedule.fusion.layers]
        fingerprint = Fingerprint(
            world_size=self._channel.world_size,
            backend=dist.get_backend(self._group),
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type,
            dtype=dtype_name(next(iter(self._schedule.fusion.layers[0].parameters.values())).dtype),
            update=self._settings.update,
            model=type(self._model).__name__,
        )
        try:  # on every rank: all come to the same result
            spec = tuner.spec(layers, fingerprint, self._settings.threshold_bytes)
        except ValidationError as error:
            logger.warning("Training goes on untuned: the service cannot describe this model. %s", error)
            return None
        first = self._channel.rank == 0
        service = ServiceThread(Client(tuner.url), spec, tuner.worker_id) if first else None
        return TuningLoop(self._channel, self._timer, tuner, service)


def _ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
