"""The model in torch, as it is trained: a DeepSeek-V3 transformer, read from top to bottom.

``Transformer(ids)`` gives logits; ``Transformer(ids, taps=(1, 3, 5, 7))`` gives the hidden states after those layers
as well. Experts are computed densely, all of them for every token, which at this size is one fast matrix product;
those not chosen get weight 0. `named_tensors` lists the weights under the names that Hugging Face checkpoints use.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from recipe import Architecture
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def rotation(positions: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, size / 2] of the rotary angles."""
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), … of x [..., positions, rope]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class Attention(nn.Module):
    """Multi-head latent attention, in the plain form: keys and values are expanded from the latent."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        heads, nope, rope = a.num_attention_heads, a.qk_nope_head_dim, a.qk_rope_head_dim
        self.q_a_proj = nn.Linear(a.hidden_size, a.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(a.q_lora_rank, 1e-6)  # eps fixed, as in transformers
        self.q_b_proj = nn.Linear(a.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(a.hidden_size, a.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(a.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(a.kv_lora_rank, heads * (nope + a.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * a.v_head_dim, a.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, heads = self.a, self.a.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([a.qk_nope_head_dim, a.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([a.kv_lora_rank, a.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([a.qk_nope_head_dim, a.v_head_dim], -1)
        k_rope = rotate(k_rope, cos, sin).to(k_nope.dtype)[:, None].expand(-1, heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin).to(q_nope.dtype)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        v = F.pad(v, (0, q.shape[-1] - a.v_head_dim))  # equal widths, so that the fast attention takes it
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : a.v_head_dim]
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class DenseMLP(nn.Module):
    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(a.intermediate_size, a.hidden_size))
        self.up_proj = nn.Parameter(torch.empty(a.intermediate_size, a.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(a.hidden_size, a.intermediate_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj), self.down_proj)


class MoE(nn.Module):
    """Routed experts, top-k by sigmoid scores plus a balancing bias, and one shared expert: the last of the stack."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        experts, width, hidden = a.n_routed_experts + a.n_shared_experts, a.moe_intermediate_size, a.hidden_size
        self.router = nn.Parameter(torch.empty(a.n_routed_experts, hidden))
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.register_buffer("bias", torch.zeros(a.n_routed_experts))  # e_score_correction_bias
        self.register_buffer("load", torch.zeros(a.n_routed_experts), persistent=False)

    def route(self, x: Tensor) -> Tensor:
        """Weight [..., experts] of every routed expert for every token, 0 where it is not chosen; all in fp32."""
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.router))
        choice = (scores + self.bias).detach()
        mine, other = choice.unsqueeze(-1), choice.unsqueeze(-2)
        lower_id = torch.ones(2 * choice.shape[-1:], dtype=torch.bool, device=x.device).tril(-1)
        rank = ((other > mine) | ((other == mine) & lower_id)).sum(-1)  # ties go to the lowest id
        chosen = (rank < self.a.num_experts_per_tok).float()
        if self.training:
            self.load.add_(chosen.flatten(0, -2).sum(0))
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.a.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        weights = F.pad(self.route(x), (0, self.a.n_shared_experts), value=1.0)
        gate, up = F.linear(x, self.gate_proj.flatten(0, 1)), F.linear(x, self.up_proj.flatten(0, 1))
        h = (F.silu(gate) * up).unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1).to(gate.dtype)
        return F.linear(h.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Raise the bias of experts with less than their share of the load since the last call, lower the others'."""
        self.bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Block(nn.Module):
    def __init__(self, a: Architecture, index: int, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.self_attn = Attention(a)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.mlp = DenseMLP(a) if index < a.first_k_dense_replace else MoE(a)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    def __init__(self, a: Architecture, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = a
        self.embed_tokens = nn.Embedding(a.vocab_size, a.hidden_size)
        self.layers = nn.ModuleList(Block(a, i, dropout) for i in range(a.num_hidden_layers))
        self.norm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.lm_head = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        cos, sin = rotation(a.max_position_embeddings, a.qk_rope_head_dim, a.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        """Draw every matrix anew; those that add to the residual stream start smaller, as there are many of them."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                into_residual = name.endswith(("o_proj.weight", "down_proj"))
                depth = math.sqrt(2 * self.a.num_hidden_layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=std / depth)

    def hidden(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """The state that the head reads, [batch, positions, hidden], and the states after the layers in `taps`."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.dropout(self.embed_tokens(ids))
        tapped = []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if index in taps:
                tapped.append(x)
        return self.norm(x), tapped

    def forward(self, ids: Tensor, taps: Sequence[int] | None = None) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Logits [batch, positions, vocabulary] of ids [batch, positions]; with `taps`, also those hidden states."""
        x, tapped = self.hidden(ids, taps or ())
        logits = self.lm_head(x)
        return logits if taps is None else (logits, tapped)


def named_tensors(model: Transformer) -> dict[str, Tensor]:
    """Every weight, two-dimensional linear maps as [out, in], under its Hugging Face name without ``.weight``."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = name.removesuffix(".weight")
        name = name if name == "lm_head" else f"model.{name}"
        prefix, _, leaf = name.rpartition(".")
        if leaf == "router":
            tensors[f"{prefix}.gate"] = tensor
        elif leaf == "bias":
            tensors[f"{prefix}.gate.e_score_correction_bias"] = tensor
        elif tensor.ndim == 3:
            routed = model.a.n_routed_experts
            for expert, matrix in enumerate(tensor):
                place = f"experts.{expert}" if expert < routed else "shared_experts"
                tensors[f"{prefix}.{place}.{leaf}"] = matrix
        else:
            tensors[name] = tensor
    return tensors


@torch.no_grad()
def load_named_tensors(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Set every weight of `model` from tensors under the names that `named_tensors` gives."""
    own = named_tensors(model)
    if own.keys() != tensors.keys():
        raise ValueError(f"load_named_tensors: names differ: {sorted(own.keys() ^ tensors.keys())[:4]} …")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
