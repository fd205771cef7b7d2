"""A: parameters that are read past the forward of the module that owns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Batch,
    Setting,
    adamw,
    check_equal,
    follow,
    plain_loss,
    scenario,
    sgd,
    twins,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize


def _encoder() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(2)]
    return nn.Sequential(nn.Linear(12, 16), *layers, nn.Linear(16, 4))


# Not Adam where there is attention: its key bias has no gradient but rounding, which Adam would blow up to full size.
@scenario("A1", "multi-head attention reads `out_proj.weight` without calling `out_proj`", world_sizes=(2, 3))
def attention(setting: Setting) -> None:
    follow(setting, _encoder, sgd)


@scenario("A1b", "attention's fused inference path, in a model that is trained in evaluation mode")
def fused_attention(setting: Setting) -> None:
    with twins(setting, _encoder, sgd) as pair:
        for side in pair:
            side.model.eval()
        for step in range(STEPS):
            outputs = []
            for side in pair:
                side.train(step)
                with torch.no_grad():
                    outputs.append(side.model(torch.ones(6, 12, dtype=torch.double)))
            check_equal(*outputs)
        pair.check()


@scenario("A2", "a parent uses a child's weight functionally", world_sizes=(2, 3))
def functional(setting: Setting) -> None:
    follow(setting, MODELS["Functional"], adamw)


@scenario("A2b", "a module keeps its children's weights in a list")
def kept_list(setting: Setting) -> None:
    follow(setting, MODELS["Hoarder"], adamw)


class _ListFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.last = nn.Linear(12, 4)
        self.kept = [self.first.weight, self.last.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(F.linear(x, self.kept[0]))
        return self.last(self.first(h)) + F.linear(h, self.kept[1])


@scenario("A2c", "one forward reads a weight through a list first and through its module later")
def list_then_module(setting: Setting) -> None:
    follow(setting, _ListFirst, adamw)


def _beside(reference: Callable[[nn.Module], Callable[[], torch.Tensor]]) -> Callable[[], nn.Module]:
    """A model whose first weight is also used through a reference that was made before any engine came."""

    def build() -> nn.Module:
        model = MODELS["Perceptron"]()
        model.first_weight = reference(model)
        return model

    return build


def _uses_reference(model: nn.Module, batch: Batch) -> torch.Tensor:
    h = F.linear(batch.x, model.first_weight())
    return model[4](model[3](model[2](h))).square().mean()


def _closure(model: nn.Module) -> Callable[[], torch.Tensor]:
    weight = model[0].weight
    return lambda: weight


def _all_parameters(model: nn.Module) -> Callable[[], torch.Tensor]:
    kept = list(model.parameters())
    return lambda: kept[0]


def _by_name(model: nn.Module) -> Callable[[], torch.Tensor]:
    kept = dict(model.named_parameters())
    return lambda: kept["0.weight"]


def _registry(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model[0]._parameters["weight"]


def _other_group(model: nn.Module) -> Callable[[], torch.Tensor]:
    groups = torch.optim.SGD(model.parameters()).param_groups
    return lambda: groups[0]["params"][0]


OUTSIDE = {
    "a closure": _closure,
    "parameters()": _all_parameters,
    "named_parameters()": _by_name,
    "_parameters": _registry,
    "param_groups": _other_group,
}


@scenario("A2d", "forward uses a weight through a reference of the user's own only", kinds=OUTSIDE)
def outside_reference(setting: Setting, reference: Any) -> None:
    follow(setting, _beside(reference), adamw, loss=_uses_reference)


def _uses_both(model: nn.Module, batch: Batch) -> torch.Tensor:
    first = _uses_reference(model, batch)
    return first + plain_loss(model, batch) + _uses_reference(model, batch)


@scenario("A2e", "a reference of the user's own before and after the model in one forward", kinds=OUTSIDE)
def outside_reference_too(setting: Setting, reference: Any) -> None:
    follow(setting, _beside(reference), adamw, loss=_uses_both)


def _functional_call(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.func.functional_call(model, dict(model.named_parameters()), (batch.x,)).square().mean()


def _functional_call_with_old(model: nn.Module, batch: Batch) -> torch.Tensor:
    return torch.func.functional_call(model, {"0.weight": model.first_weight()}, (batch.x,)).square().mean()


@scenario(
    "A2f",
    "`torch.func.functional_call`",
    kinds={"parameters of now": _functional_call, "a parameter kept from before": _functional_call_with_old},
)
def functional_call(setting: Setting, loss: Any) -> None:
    follow(setting, _beside(_closure), adamw, loss=loss)


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x.T) / 2


def _square() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 4))


def _parametrized(register: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = _square()
        register(model[2])
        return model

    return build


@scenario(
    "A2g",
    "a parametrization is registered before the model is wrapped",
    kinds={
        "symmetric": lambda module: parametrize.register_parametrization(module, "weight", _Symmetric()),
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": lambda module: parametrizations.spectral_norm(module).eval(),  # it counts calls in training
        "orthogonal": parametrizations.orthogonal,
    },
)
def parametrized_before(setting: Setting, register: Any) -> None:
    follow(setting, _parametrized(register), sgd)


@scenario("A2h", "a parametrization is registered after the model is wrapped, while an update is pending")
def parametrized_after(setting: Setting) -> None:
    with twins(setting, _square, adamw) as pair:
        pair.train(range(2))
        for side in pair:
            parametrize.register_parametrization(side.model[2], "weight", _Symmetric())
        pair.train(range(2, 2 + STEPS))
        pair.check()


@scenario("A2i", "the loss has a penalty over a list of parameters that was made before")
def penalty(setting: Setting) -> None:
    def build() -> nn.Module:
        model = MODELS["Perceptron"]()
        kept = list(model.parameters())
        model.penalty = lambda: sum(p.square().sum() for p in kept)
        return model

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        before = model.penalty()
        return plain_loss(model, batch) + 0.01 * before

    follow(setting, build, adamw, loss=loss)


def _detached(model: nn.Module, batch: Batch) -> torch.Tensor:
    scale = 1 + model.first_weight().detach().norm()
    return plain_loss(model, batch) / scale


def _data(model: nn.Module, batch: Batch) -> torch.Tensor:
    scale = 1 + model.first_weight().data.abs().max()
    return plain_loss(model, batch) / scale


def _number(model: nn.Module, batch: Batch) -> torch.Tensor:
    scale = 1 + model.first_weight()[0, 0].item() ** 2
    return plain_loss(model, batch) / scale


@scenario(
    "A2j",
    "the loss depends on the value of a parameter without a gradient",
    kinds={"detach()": _detached, ".data": _data, "item()": _number},
)
def value_only(setting: Setting, loss: Any) -> None:
    follow(setting, _beside(_closure), adamw, loss=loss)


class _Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(12, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.stack([member.weight for member in self.members])
        biases = torch.stack([member.bias for member in self.members])
        return torch.baddbmm(biases[:, None], x.expand(3, *x.shape), weights.mT).flatten(1)


@scenario("A2k", "the weights of an ensemble are stacked, its modules never called")
def stacked(setting: Setting) -> None:
    follow(setting, _Stacked, adamw)


@scenario("A3", "parameter lists and dictionaries, which are never called")
def containers(setting: Setting) -> None:
    follow(setting, MODELS["Containers"], adamw)


class _Writer(nn.Module):
    """Has several ways in, none of which is forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 12)
        self.cell = nn.GRUCell(12, 12)
        self.head = nn.Linear(12, 4)
        self.early = self.encode

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed(x))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        state = self.encode(x)
        for _ in range(3):
            state = self.cell(self.embed(x), state)
        return self.head(state)


def _generate(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model.generate(batch.x).square().mean() + model.encode(batch.x).mean()


def _submodules(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model.head(model.embed(batch.x)).square().mean()


def _bound_early(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model.head(model.early(batch.x)).square().mean()


@scenario(
    "A4",
    "entry by a method other than `forward`",
    kinds={"generate": _generate, "submodules only": _submodules, "a method bound before": _bound_early},
)
def other_methods(setting: Setting, loss: Any) -> None:
    follow(setting, _Writer, adamw, loss=loss)


@scenario("A4b", "entry by slices of an attached `Sequential`")
def sliced(setting: Setting) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model[2:](model[:2](batch.x)).square().mean()

    follow(setting, _square, adamw, loss=loss)


class _Root(nn.Module):
    """The root owns a token, positions, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 12) / 3)
        self.positions = nn.Parameter(torch.randn(7, 12) / 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.token, x]) + self.positions
        return self.head(torch.tanh(self.body(h))) * self.scale.exp()


@scenario("A5", "the root module owns parameters: a class token, a position embedding, a scale", world_sizes=(2, 3))
def root_parameters(setting: Setting) -> None:
    follow(setting, _Root, adamw)


class _Tied(nn.Module):
    """Language model in small: the decoder, registered later, shares the embedding's weight and runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 12)
        self.body = nn.Linear(12, 12)
        self.decoder = nn.Linear(12, 12, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        primed = self.decoder(x)
        h = self.embedding(x.abs().mul(10).long() % 12).mean(1)
        return self.decoder(torch.tanh(self.body(h + primed)))


@scenario("A6", "tied weights, where a later owner runs first", world_sizes=(2, 3))
def tied(setting: Setting) -> None:
    follow(setting, _Tied, adamw)


class _Alias(nn.Module):
    """A frozen parameter in a trained one's memory, which its owner reads without the trained one's name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = nn.Parameter(self.first.weight.data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.again(x).tanh())


@scenario("A6c", "a frozen parameter that lies in the memory of a trained one, and is read first")
def alias(setting: Setting) -> None:
    follow(setting, _Alias, adamw)


def _tied_thrice() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    model[3].weight = model[2].weight = model[0].weight
    model[1].bias = model[3].bias
    return model


@scenario("A6b", "one weight with three owners, and a bias with two in another order")
def tied_thrice(setting: Setting) -> None:
    follow(setting, _tied_thrice, adamw)
