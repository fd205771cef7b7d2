"""What users touch: `DistributedOptimizer`, three changed lines in a training script."""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from pydantic import ValidationError

from dear_engine import barrier
from dear_engine.collectives import Channel, Traffic, check_backend, collectives_for
from dear_engine.layers import ModelLayer, dtype_name, layers_of
from dear_engine.schedule import Schedule
from dear_engine.timing import IterationTimer, clock_for
from dear_engine.tuner import ServiceThread, Tuner, TuningLoop
from dear_engine.update import check_hooks, check_supported
from dear_tune.client import Client
from dear_tune.contract import DEFAULT_THRESHOLD_BYTES, Fingerprint
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from dear_tune.fusion import FusionPlan

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger("dear_engine")


class DistributedOptimizer(torch.optim.Optimizer):
    """Data-parallel training on the DeAR schedule: wraps an optimizer, and hooks into the model it steps.

    All ranks of the process group construct it together, with the same model and optimizer; parameters and buffers
    start as rank 0's. Between `step()` and the next forward, updates are pending: they are applied when a parameter
    is first read through the model. Gradients in `.grad` are this rank's own, and must not be changed between
    `backward()` and `step()`.

    Args:
        optimizer: any `torch.optim` optimizer that steps its parameters independently of each other.
        model: owns all of the optimizer's parameters.
        threshold_bytes: the fusion threshold, in bytes, to begin with; with a tuner the default it must beat.
        tuner: how the threshold is tuned; "environment": by `DEAR_TUNE_URL` if that is set; None: not at all.
        update: "replicated": every rank steps all parameters.
        process_group: the ranks that train together; None for all.

    Raises:
        UnsupportedError: before anything is changed, for what the engine would get wrong.
    """

    # The stock GradScaler then leaves unscaling to `step`, and so to us.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        threshold_bytes: int = DEFAULT_THRESHOLD_BYTES,
        tuner: Tuner | Literal["environment"] | None = "environment",
        update: Literal["replicated"] = "replicated",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedError("DistributedOptimizer(optimizer, model): the optimizer comes first, then the model.")
        if not dist.is_initialized():
            raise UnsupportedError("Call torch.distributed.init_process_group() before DistributedOptimizer(...).")
        if update != "replicated":
            raise UnsupportedError(f'update={update!r}: only "replicated" is supported.')
        if isinstance(threshold_bytes, bool) or not isinstance(threshold_bytes, int) or threshold_bytes < 1:
            raise UnsupportedError(f"threshold_bytes is a whole number of bytes, at least 1; got {threshold_bytes!r}.")
        group = process_group or dist.group.WORLD
        assert group is not None  # it is initialized
        if dist.get_rank(group) < 0:
            raise UnsupportedError("This process is not a member of process_group; only its members train with it.")
        check_supported(optimizer)
        layers = layers_of(model, optimizer)
        device = next(iter(layers[0].parameters.values())).device
        check_backend(group, device)
        wanted = _Settings(
            threshold_bytes=threshold_bytes, tuner=Tuner.from_environment() if tuner == "environment" else tuner
        )
        self._optimizer = optimizer
        self._model = model
        # As an optimizer that is restored from a pickle sets itself up, without parameter groups of its own.
        self.__setstate__({"defaults": optimizer.defaults})
        self._channel = Channel(group)
        try:
            settings = _agree(self._channel, layers, list(model.buffers()), wanted)
            self._frozen = _frozen_parameters(optimizer)
            self._collectives = collectives_for(group, device, self._channel)
            self._schedule = Schedule(layers, optimizer, self._collectives, settings.threshold_bytes)
            self._threshold_bytes = settings.threshold_bytes
            self._timer = IterationTimer(clock_for(device))
            barrier.attach(model, self)
        except UnsupportedError:
            self._channel.close()
            raise
        _start_equal(model, group)
        self._schedule.start()
        self._closed = False
        # Also whoever goes to the wrapped optimizer gets its latest state, and does not restore under an update.
        self._state_hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.read_all(interrupts=True)),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.read_all(interrupts=True)),
        ]
        self._tuning = self._tuning_loop(settings, layers, dist.get_backend(group), device)

    # Both read-only on purpose: they are always the wrapped optimizer's.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, by parameter, with all pending updates applied."""
        self._schedule.synchronize()
        return self._optimizer.state

    @property
    def threshold_bytes(self) -> int:
        """The fusion threshold in force, in bytes; see `set_threshold`."""
        return self._threshold_bytes

    @property
    def plan(self) -> FusionPlan:
        """The fusion plan in force."""
        return self._schedule.plan

    @property
    def tuning(self) -> bool:
        """Whether thresholds are being tried; the same on all ranks at the same step."""
        return self._tuning is not None and self._tuning.measuring

    @property
    def traffic(self) -> Traffic:
        """How many collectives this rank has started, and how many bytes it has sent in them."""
        return self._collectives.traffic

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
        # Schedulers that were built on the wrapped optimizer look there whether it has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._tuning is not None:
            self._fuse(self._tuning.after_step(self._threshold_bytes))
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the backward passes inside; the first one outside communicates the sum."""
        before, self._schedule.reducing = self._schedule.reducing, False
        try:
            yield
        finally:
            self._schedule.reducing = before

    def synchronize(self) -> None:
        """Apply all pending updates now. Done for you wherever the model's parameters are read."""
        self._schedule.synchronize()

    def set_threshold(self, threshold_bytes: int) -> None:
        """Fuse anew by another threshold, in bytes, after a step. All ranks do it after the same one.

        Raises:
            UnsupportedError: a tuner sets the threshold.
            GradientError: gradients are there that no step has used yet.
        """
        if self._tuning is not None:
            raise UnsupportedError(
                "The tuner sets the threshold of this run; build it with tuner=None to set your own."
            )
        self._fuse(threshold_bytes)

    def _fuse(self, threshold_bytes: int) -> None:
        if threshold_bytes != self._threshold_bytes:
            self._schedule.fuse(threshold_bytes)
            self._threshold_bytes = threshold_bytes

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, with all pending updates applied."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer's state; pending updates are applied before."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported yet: `UnsupportedError`."""
        raise UnsupportedError(
            f"add_param_group() with {len(param_group)} entries after DistributedOptimizer(...) was built: close() it, "
            "add the group to the wrapped optimizer, and build it again."
        )

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse to be copied or pickled: `UnsupportedError`."""
        raise UnsupportedError("A DistributedOptimizer cannot be copied or pickled; save its state_dict().")

    def close(self) -> None:
        """Apply what is pending, stop tuning, and give the model back as it was. All ranks call it.

        Gradients that no step has used stay in `.grad`, as this rank's own.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._state_hooks:
            hook.remove()
        try:
            self._schedule.close()
        finally:
            barrier.detach(self._model, self)
            if self._tuning is not None:
                self._tuning.close()
            self._channel.close()

    def holds(self, parameter: torch.Tensor) -> bool:
        """For the read barrier: whether this engine updates the parameter."""
        return self._schedule.holds(parameter)

    def read(self, parameter: torch.Tensor) -> None:
        """For the read barrier: bring one parameter up to date."""
        self._schedule.read(parameter)

    def read_all(self, *, interrupts: bool) -> None:
        """For the read barrier: bring all parameters up to date."""
        if interrupts:
            self._timer.interrupt()
        self._schedule.synchronize()

    def _check_step(self) -> None:
        """Refuse what has become wrong since the engine was built."""
        if self._closed:
            raise UnsupportedError(
                "This DistributedOptimizer is closed; step the wrapped optimizer, or build a new one."
            )
        check_hooks(self._optimizer)
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UnsupportedError(
                "A parameter that was frozen when DistributedOptimizer(...) was built requires a gradient now. "
                "Freeze after building it, or close() it and build it again."
            )
        if getattr(self, "found_inf", None) is not None:  # as torch.amp.GradScaler hands it over
            raise UnsupportedError(
                "GradScaler is not supported yet: gradients have been communicated before it unscales them. Train in "
                "bfloat16, which needs no scaler."
            )

    def _tuning_loop(
        self, settings: _Settings, layers: list[ModelLayer], backend: str, device: torch.device
    ) -> TuningLoop | None:
        tuner = settings.tuner
        if tuner is None:
            return None
        fingerprint = Fingerprint(
            world_size=self._channel.world_size,
            backend=backend,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=dtype_name(next(iter(layers[0].parameters.values())).dtype),
            model=type(self._model).__name__,
        )
        try:  # on every rank: all come to the same result
            spec = tuner.spec([layer.layer for layer in layers], fingerprint, settings.threshold_bytes)
        except ValidationError as error:
            logger.warning("Training goes on untuned: the service cannot describe this model. %s", error)
            return None
        first = self._channel.rank == 0
        service = ServiceThread(Client(tuner.url), spec, tuner.worker_id) if first else None
        return TuningLoop(self._channel, self._timer, tuner, service)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    threshold_bytes: int
    tuner: Tuner | None


def _agree(channel: Channel, layers: list[ModelLayer], buffers: list[torch.Tensor], own: _Settings) -> _Settings:
    """Rank 0's settings, once all ranks are known to have the same layers and buffers."""
    named = [item for layer in layers for item in layer.parameters.items()]
    tensors = [*named, *(("", buffer) for buffer in buffers)]
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()
    everyone: list[Any] = [None] * channel.world_size
    dist.all_gather_object(everyone, (digest, own), group=channel.group)
    different = [rank for rank, (theirs, _) in enumerate(everyone) if theirs != everyone[0][0]]
    if different:
        raise UnsupportedError(
            f"Ranks {different} have other parameters or buffers than rank 0; all must build the same model."
        )
    settings: _Settings = everyone[0][1]
    return settings


def _start_equal(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Rank 0's parameters and buffers, everywhere, byte for byte: backends do not know every dtype."""
    source = dist.get_global_rank(group, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        # An expanded dimension is the same memory again and again: once is enough, and all that may be written.
        own = tensor.detach()[tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())]
        contiguous = own.contiguous()
        if own.numel():
            dist.broadcast(contiguous.view(-1).view(torch.uint8), source, group=group)
        if not own.is_contiguous():
            own.copy_(contiguous)


def _frozen_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
