"""The drafter in torch, as it is trained: DFlash's block-diffusion layers and a transition head.

A block is the last committed token and MASK for each position after it. Its rows see each other in both directions,
and the target's hidden states of all committed tokens before the block, as extra keys and values of every layer.
The target's embedding and head are used as they are. Rotary positions in halves, as Qwen3's layers have them.
"""

import torch
import torch.nn.functional as F
from model import DenseMLP, RMSNorm, Transformer
from recipe import DrafterArchitecture
from torch import Tensor, nn


def rotate_half(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (i, i + size / 2) of x [..., rows, heads, size] by positions [..., rows]."""
    size = x.shape[-1]
    frequency = theta ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angle = (positions[..., None].float() * frequency)[..., None, :]
    first, second = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class BlockAttention(nn.Module):
    def __init__(self, a: DrafterArchitecture) -> None:
        super().__init__()
        self.a = a
        self.q_proj = nn.Linear(a.hidden_size, a.num_attention_heads * a.head_dim, bias=False)
        self.k_proj = nn.Linear(a.hidden_size, a.num_key_value_heads * a.head_dim, bias=False)
        self.v_proj = nn.Linear(a.hidden_size, a.num_key_value_heads * a.head_dim, bias=False)
        self.o_proj = nn.Linear(a.num_attention_heads * a.head_dim, a.hidden_size, bias=False)
        self.q_norm = RMSNorm(a.head_dim, a.rms_norm_eps)
        self.k_norm = RMSNorm(a.head_dim, a.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """x [texts, rows, hidden] at `positions` [texts, rows] sees `context` [texts, tokens, hidden] and itself."""
        a, tokens = self.a, context.shape[1]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, a.head_dim)))
        keys_from = torch.cat((context.to(x.dtype), x), 1)
        k = self.k_norm(self.k_proj(keys_from).unflatten(-1, (-1, a.head_dim)))
        v = self.v_proj(keys_from).unflatten(-1, (-1, a.head_dim))
        before = torch.arange(tokens, device=x.device).expand(len(x), -1)
        q = rotate_half(q, positions, a.rope_theta)
        k = rotate_half(k, torch.cat((before, positions), 1), a.rope_theta)
        q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], enable_gqa=k.shape[1] != q.shape[1])
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, a: DrafterArchitecture) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.self_attn = BlockAttention(a)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.mlp = DenseMLP(a)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, positions, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transition(nn.Module):
    """How much likelier a candidate becomes after a parent: ``child_table[j] · f(parent_table[i])``.

    ``static``: f is the identity. ``gated``: f(u) = silu(u + gate · h), h the row that the head reads.
    """

    def __init__(self, a: DrafterArchitecture, vocabulary: int, gated: bool) -> None:
        super().__init__()
        self.parent_table = nn.Embedding(vocabulary, a.transition_rank)
        self.child_table = nn.Embedding(vocabulary, a.transition_rank)
        self.gate = nn.Linear(a.hidden_size, a.transition_rank, bias=False) if gated else None

    def forward(self, parents: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Scores [..., candidates] after parents [...], with hidden [..., hidden] and candidates [..., candidates]."""
        left = self.parent_table(parents)
        if self.gate is not None:
            left = F.silu(left + self.gate(hidden))
        return (self.child_table(candidates) @ left.unsqueeze(-1)).squeeze(-1)


class Drafter(nn.Module):
    def __init__(self, a: DrafterArchitecture) -> None:
        super().__init__()
        self.a = a
        self.fc = nn.Linear(len(a.target_layer_ids) * a.hidden_size, a.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.num_hidden_layers))
        self.norm = RMSNorm(a.hidden_size, a.rms_norm_eps)

    @torch.no_grad()
    def initialise(self, std: float, feature_scales: list[float]) -> None:
        """Draw every matrix anew; ``fc`` meets each tapped layer's features, whose size is given, alike."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)
        for columns, scale in zip(self.fc.weight.chunk(len(feature_scales), 1), feature_scales, strict=True):
            columns /= scale  # features of later layers are larger

    def forward(self, target: Transformer, features: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Hidden rows [texts, anchors, block − 1, hidden] of a block after each anchor, its last committed token.

        features [texts, tokens, taps · hidden]; ids int [texts, tokens]; anchors int [texts, anchors], places in ids.
        """
        texts, count = anchors.shape
        tokens, block = ids.shape[1], self.a.block_size
        context = self.hidden_norm(self.fc(features))
        blocks = torch.full((texts, count, block), self.a.mask_token_id, device=ids.device)
        blocks[..., 0] = ids.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(block, device=ids.device)).flatten(1)
        x = target.embed_tokens(blocks.flatten(1))
        own = torch.arange(count, device=ids.device).repeat_interleave(block)
        anchor = anchors.repeat_interleave(block, 1)[..., None]
        key = torch.arange(tokens, device=ids.device)
        seen = (key < anchor) & (key >= anchor - self.a.sliding_window)
        visible = torch.cat((seen, (own[:, None] == own).expand(texts, -1, -1)), 2)
        for layer in self.layers:
            x = layer(x, context, positions, visible)
        return self.norm(x).unflatten(1, (count, block))[:, :, 1:]
