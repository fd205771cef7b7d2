"""Public architectures, small and with random weights, and what the ranks run to compare them with the oracle.

Their libraries are the extra `architectures`, which only `make test-architectures` installs: they are imported where a
model is built.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support.training import digest, distance, engine
from torch import nn
from torch.nn import functional as F

LIBRARIES = ("diffusers", "torch_geometric", "transformers", "x_transformers")

Loss = Callable[[nn.Module], torch.Tensor]
"""The loss of a model in training, on a batch drawn from the global random state, as dropout is."""

ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {}
"""Builders of a model and its loss, by name."""


def _architecture(build: Callable[[], tuple[nn.Module, Loss]]) -> Callable[[], tuple[nn.Module, Loss]]:
    ARCHITECTURES[build.__name__] = build
    return build


def _tokens(count: int = 12, vocabulary: int = 40) -> torch.Tensor:
    return torch.randint(vocabulary, (3, count))


def _image(channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randn(2, channels, size, size, dtype=torch.double)


def _labels() -> torch.Tensor:
    return torch.randint(4, (2,))


def _language_loss(model: nn.Module, count: int = 12) -> torch.Tensor:
    """Of the logits, for the models' own losses are in single precision; labels are the decoder's input, if any."""
    tokens = _tokens(count)
    logits = model(input_ids=tokens, labels=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@_architecture
def gpt2() -> tuple[nn.Module, Loss]:
    """Matrices that are stored transposed, and a head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)), _language_loss


@_architecture
def t5() -> tuple[nn.Module, Loss]:
    """Encoder and decoder share an embedding; all layers use the first one's table of relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return T5ForConditionalGeneration(config), _language_loss


@_architecture
def mixtral() -> tuple[nn.Module, Loss]:
    """A mixture of experts that lie in one parameter, with rotary positions and grouped queries."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",  # the other one knows no double precision
    )
    return MixtralForCausalLM(config), _language_loss


@_architecture
def switch() -> tuple[nn.Module, Loss]:
    """A mixture of experts that are modules: some have no token on a rank, or on any, and then no gradient."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=8,
        expert_capacity=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = SwitchTransformersForConditionalGeneration(config)
    for module in model.modules():
        if hasattr(module, "router"):
            module.router.dtype = torch.double  # what it casts its matrix to at every forward
    return model, _language_loss


@_architecture
def bert() -> tuple[nn.Module, Loss]:
    """Every layer is computed anew in backward; the head's matrix and bias are tied."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = BertForMaskedLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model, _language_loss


@_architecture
def albert() -> tuple[nn.Module, Loss]:
    """One layer, called four times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=40,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return AlbertForMaskedLM(config), _language_loss


@_architecture
def reformer() -> tuple[nn.Module, Loss]:
    """Reversible layers: an autograd function of its own runs the layers again in backward, and backward inside it."""
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=40,
        hidden_size=16,
        feed_forward_size=32,
        num_attention_heads=2,
        attention_head_size=8,
        attn_layers=["local", "lsh", "local"],
        axial_pos_shape=(4, 4),
        axial_pos_embds_dim=(8, 8),
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        hash_seed=0,
        hidden_dropout_prob=0.0,  # its seeds are torch.seed()'s, and so other ones in every run
        local_attention_probs_dropout_prob=0.0,
        is_decoder=True,
    )

    return ReformerModelWithLMHead(config), lambda model: _language_loss(model, 16)


@_architecture
def mamba() -> tuple[nn.Module, Loss]:
    """State spaces: parameters that no module of torch's owns, used outside matrix products."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config), _language_loss


@_architecture
def vit() -> tuple[nn.Module, Loss]:
    """An image transformer, whose class token and positions belong to no layer that is called."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=4,
    )
    return ViTForImageClassification(config), lambda model: model(pixel_values=_image(), labels=_labels()).loss


@_architecture
def resnet() -> tuple[nn.Module, Loss]:
    """Convolutions with batch normalization."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
        num_labels=4,
        downsample_in_first_stage=False,
    )
    return ResNetForImageClassification(config), lambda model: model(pixel_values=_image(), labels=_labels()).loss


@_architecture
def clip() -> tuple[nn.Module, Loss]:
    """Two towers that meet in one loss, with a temperature that is a single number."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )

    def loss(model: nn.Module) -> torch.Tensor:
        return model(input_ids=_tokens()[:2], pixel_values=_image(), return_loss=True).loss

    return CLIPModel(config), loss


@_architecture
def wav2vec2() -> tuple[nn.Module, Loss]:
    """Layers that a rank drops at random, and a weight that a parametrization makes of two parameters."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.4,
    )

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(input_values=torch.randn(2, 320, dtype=torch.double)).logits
        return F.cross_entropy(logits.flatten(0, 1), torch.randint(12, (logits.shape[0] * logits.shape[1],)))

    return Wav2Vec2ForCTC(config), loss


@_architecture
def graph_attention() -> tuple[nn.Module, Loss]:
    """A graph network: message passing along edges, on graphs of another size on each rank."""
    from torch_geometric.nn import GATv2Conv, GINConv, global_mean_pool

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = GATv2Conv(6, 8, heads=2, edge_dim=3)
            self.isomorphism = GINConv(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), train_eps=True)
            self.head = nn.Linear(16, 4)

        def forward(
            self, x: torch.Tensor, edges: torch.Tensor, marks: torch.Tensor, graphs: torch.Tensor
        ) -> torch.Tensor:
            h = self.attention(x, edges, marks).tanh()
            return self.head(global_mean_pool(self.isomorphism(h, edges), graphs, size=2))

    def loss(model: nn.Module) -> torch.Tensor:
        nodes, edges = int(torch.randint(8, 14, ())), int(torch.randint(16, 30, ()))
        graphs = torch.randint(2, (nodes,)).sort().values
        x, marks = torch.randn(nodes, 6, dtype=torch.double), torch.randn(edges, 3, dtype=torch.double)
        return F.cross_entropy(model(x, torch.randint(nodes, (2, edges)), marks, graphs), _labels())

    return Graphs(), loss


@_architecture
def diffusion() -> tuple[nn.Module, Loss]:
    """A U-Net, whose skips go around most of it, conditioned on time and, by cross-attention, on a text."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=2,
    )

    def loss(model: nn.Module) -> torch.Tensor:
        text, times = torch.randn(2, 5, 8, dtype=torch.double), torch.randint(1000, (2,))
        image = _image(size=8)
        return (model(image, times, encoder_hidden_states=text).sample - image.flip(0)).square().mean()

    return model, loss


@_architecture
def memory_tokens() -> tuple[nn.Module, Loss]:
    """A decoder with memory tokens, rotary positions, gated feed-forward layers and layers that are dropped."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(
        dim=16, depth=3, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True, layer_dropout=0.3
    )
    model = TransformerWrapper(
        num_tokens=40, max_seq_len=16, num_memory_tokens=2, tie_embedding=True, attn_layers=layers
    )
    return AutoregressiveWrapper(model), lambda model: model(_tokens())


@dataclass(frozen=True)
class Trained:
    """How a rank's training ended.

    Attributes:
        distance: of the parameters from the oracle's, at most.
        buffers: distance of the buffers from those that the oracle's forwards of this rank's batches left.
        digest: of the parameters.
        absent: how many parameters had no gradient on this rank, step by step.
        loss: the last one.
    """

    distance: float
    buffers: float
    digest: str
    absent: list[int]
    loss: float


def train(name: str, update: str, threshold_bytes: int, steps: int) -> Trained:
    """Train from different seeds on each rank; the oracle starts as rank 0 does."""
    rank = dist.get_rank()
    (model, loss_of), (reference, _) = _build(name, rank), _build(name, 0)
    oracle, absent = Oracle(reference, loss_of), []
    loss = torch.tensor(0.0)
    with engine(model, optimizer_of(model), threshold_bytes=threshold_bytes, update=update) as optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            seed(step, rank)
            loss = loss_of(model)
            loss.backward()
            absent.append(sum(p.grad is None for p in model.parameters()))
            optimizer.step()
            oracle.step(step)
        optimizer.synchronize()
        return Trained(
            distance(model, reference), oracle.buffers_distance(model, rank), digest(model), absent, loss.item()
        )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Adam blows rounding up to full size where the true gradient is zero (a key's bias): not with this epsilon."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


def seed(step: int, rank: int) -> None:
    """What a rank draws in a step: its batch, and what its model drops."""
    import numpy as np

    number = 1000 * step + rank
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Oracle:
    """One process that runs every rank's batch, with buffers of each rank's own, and averages the gradients."""

    def __init__(self, model: nn.Module, loss_of: Loss) -> None:
        self._model = model
        self._loss_of = loss_of
        self._optimizer = optimizer_of(model)
        self._buffers = [[buffer.clone() for buffer in model.buffers()] for _ in range(dist.get_world_size())]

    def step(self, step: int) -> None:
        """One step of all ranks."""
        self._optimizer.zero_grad()
        for rank, buffers in enumerate(self._buffers):
            for buffer, own in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(own)
            seed(step, rank)
            (self._loss_of(self._model) / dist.get_world_size()).backward()
            self._buffers[rank] = [buffer.clone() for buffer in self._model.buffers()]
        self._optimizer.step()

    def buffers_distance(self, model: nn.Module, rank: int) -> float:
        """The largest difference of any buffer from the one of this rank."""
        pairs = zip(model.buffers(), self._buffers[rank], strict=True)
        return max(((a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel()), default=0.0)


def _build(name: str, number: int) -> tuple[nn.Module, Loss]:
    seed(0, number)
    model, loss = ARCHITECTURES[name]()
    return model.double().train(), loss
