"""A small reinforcement-learning loop whose samples have the log-probabilities of the trainer.

    python reinforce.py --updates 20

A language model samples tokens with a cache, one at a time, in a padded batch. The trainer scores
the same tokens in one forward with gradients. With `numerics="invariant"` both have the same bits,
so that the importance ratio of each token is exactly 1 before the weights change.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional

import amp_fx

VOCABULARY, WANTED = 24, 7


class Layer(nn.Module):
    """Attention over the keys and values so far, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps [batch, time, width]; also returns keys and values [2, batch, heads, time, size]."""
        q, *new = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.stack(new)
        if past is not None:
            seen = torch.cat([past, seen], dim=3)
        y = functional.scaled_dot_product_attention(q, seen[0], seen[1], mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)))), seen


class Policy(nn.Module):
    """Gives the log-probabilities of all tokens at each position."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Scores [batch, time] tokens; the log-softmax is part of what is compiled."""
        x = self.token(tokens) + self.position(positions)
        seen = []
        for index, layer in enumerate(self.layers):
            x, keys_and_values = layer(x, mask, None if cache is None else cache[index])
            seen.append(keys_and_values)
        return self.head(x).float().log_softmax(-1), seen


def causal(real: torch.Tensor) -> torch.Tensor:
    """The mask of a batch [batch, time], which is False where there is padding."""
    length = real.size(1)
    before = torch.ones(length, length, dtype=torch.bool).tril()
    return (before & real[:, None])[:, None]


@torch.no_grad()
def sample(
    model: Policy, prompts: list[torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples from left-padded prompts with a cache: tokens, their scores, and what is real."""
    length = max(map(len, prompts))
    tokens = torch.stack([functional.pad(p, (length - len(p), 0)) for p in prompts])
    real = torch.stack([torch.arange(length) >= length - len(p) for p in prompts])
    new, positions, mask = tokens, (real.cumsum(1) - 1).clamp(min=0), causal(real)
    cache, scores = None, []
    for _ in range(count):
        given, cache = model(new, positions, mask, cache)
        last = given[:, -1]
        new = torch.multinomial(last.exp(), 1)
        scores.append(last.gather(1, new))
        tokens, real = torch.cat([tokens, new], 1), functional.pad(real, (0, 1), value=True)
        positions, mask = positions[:, -1:] + 1, real[:, None, None]
    return tokens, torch.cat(scores, 1), real


def score(model: Policy, tokens: torch.Tensor, real: torch.Tensor, count: int) -> torch.Tensor:
    """Scores the last tokens of each row by itself, without padding and with gradients."""
    rows = []
    for row, is_real in zip(tokens, real, strict=True):
        text = row[is_real][None]
        mask = causal(torch.ones_like(text, dtype=torch.bool))
        given, _ = model(text, torch.arange(text.size(1))[None], mask)
        rows.append(given[:, -count - 1 : -1].gather(2, text[:, -count:, None])[..., 0])
    return torch.cat(rows)


def main() -> None:
    """Trains a policy to say one token, and prints the importance ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--numerics", default="invariant")
    parser.add_argument("--compiler", default="inductor")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 32
    model = Policy(args.width, 2)
    options = {"compiler": args.compiler}
    policy = amp_fx.compile(model, numerics=args.numerics, dynamic=True, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompts = [torch.randint(VOCABULARY, (length,)) for length in (3, 1, 4, 2)]
    for update in range(args.updates):
        tokens, sampled, real = sample(policy, prompts, args.tokens)
        scored = score(policy, tokens, real, args.tokens)
        ratio = (scored - sampled).exp()
        num_other = int((scored != sampled).sum())
        reward = (tokens[:, -args.tokens :] == WANTED).float()
        loss = -(ratio * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"update {update}: reward {reward.mean():.2f}, {num_other} ratios are not 1")
        assert args.numerics != "invariant" or num_other == 0


if __name__ == "__main__":
    main()
