"""Small models, each with one trait that has caught out engines which hook into modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Functional(nn.Module):
    """Uses a child's weight without calling the child, and a tied one under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 12, bias=False)
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 12, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.head.weight)
        h = torch.tanh(self.body(h))
        return F.linear(self.embed(h), self.out.weight, self.out.bias)


class Attention(nn.Module):
    """Multi-head attention reads `out_proj.weight` past the module that owns it; the root owns a token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 12) / 3)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.token.expand(len(x), 1, 12), x[:, None], x.flip(1)[:, None]], dim=1)
        for layer in self.layers:
            h = layer(h)
        return self.head(h[:, 0])


class Containers(nn.Module):
    """Parameter lists and dictionaries are never called; entry is by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(12, 12) / 4 for _ in range(3))
        self.scales = nn.ParameterDict({"a": torch.ones(12), "b": torch.ones(12)})
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.scales["a"] + self.scales["b"]


class Recurrent(nn.Module):
    """The recurrent layers keep their weights in a list of their own; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(x.view(len(x), 2, 6))
        h, _ = self.lstm(h)
        return self.head(h[:, -1])


class Backwards(nn.Module):
    """Modules run in another order than they are registered in; one is unused, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)
        self.unused = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.first = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x))))


class Sometimes(nn.Module):
    """An expert takes part only for some inputs: on some ranks only, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12)
        self.expert = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(x)
        if x.sum() > 0:
            h = h + self.expert(x)
        return self.head(torch.tanh(h))


class Checkpointed(nn.Module):
    """Recomputes a part of forward inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.middle, self.stem(x), use_reentrant=False))


class Convolutional(nn.Sequential):
    """Batch normalization, and gradients that are not contiguous."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (3, 2, 2)),
            nn.Conv2d(3, 8, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 2),
            nn.Flatten(),
        )
        self.to(memory_format=torch.channels_last)


class Hoarder(nn.Module):
    """Keeps its children's weights in a list, and buffers that no backend broadcasts as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
        self.weights = [layer.weight for layer in self.layers]
        self.head = nn.Linear(12, 4)
        self.register_buffer("rotation", torch.polar(torch.ones(6), torch.randn(6)))
        self.register_buffer("expanded", torch.randn(1, 1).expand(40, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        turned = torch.view_as_complex(x.view(len(x), 6, 2)) * self.rotation
        return self.head(torch.view_as_real(turned).flatten(1))


class Perceptron(nn.Sequential):
    """Nothing special, and a parameter with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1), nn.Linear(1, 4))


MODELS: dict[str, type[nn.Module]] = {
    model.__name__: model
    for model in (
        Perceptron,
        Functional,
        Attention,
        Containers,
        Recurrent,
        Backwards,
        Sometimes,
        Checkpointed,
        Convolutional,
        Hoarder,
    )
}
