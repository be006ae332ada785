"""Hydragen's decode loop with `SharedCache`: no vLLM, any model whose attention is replaceable.

    python examples/hydragen_loop.py

A small transformer with random weights samples several answers to each of several problems, under
one system prompt and one of several sets of few-shot examples. Shared pieces are prefilled once and
read once per step. A second loop samples the same tokens row by row, with torch's attention over
concatenated KV. Exit status: 1 if the loops differ.
"""

import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from vllm_relay.ops import SharedCache

VOCAB, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 512, 2, 128, 8, 2, 16
SYSTEM, FEW_SHOT, PROBLEMS = 160, (2, 48), (4, 20)  # tokens; (pieces, most tokens of each)
ROUNDS, SAMPLES, NEW_TOKENS = 2, 3, 24


class Model:
    """Pre-norm transformer with RoPE and grouped queries; attention is the caller's."""

    def __init__(self) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns) * columns**-0.5

        self.embedding = torch.randn(VOCAB, WIDTH)
        heads = HEADS + 2 * KV_HEADS
        self.layers = [
            {
                "qkv": weight(heads * HEAD_SIZE, WIDTH) * 2,
                "out": weight(WIDTH, HEADS * HEAD_SIZE) * 2,
                "up": weight(2 * WIDTH, WIDTH),
                "down": weight(WIDTH, 2 * WIDTH),
            }
            for _ in range(LAYERS)
        ]

    def __call__(self, ids: Tensor, positions: Tensor, attend) -> Tensor:
        """Logits [R, n, VOCAB] of tokens [R, n] at positions [R, n]."""
        x = self.embedding[ids]
        for i, layer in enumerate(self.layers):
            qkv = (rms_norm(x, (WIDTH,)) @ layer["qkv"].T).unflatten(-1, (-1, HEAD_SIZE))
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], -2)
            attended = attend(i, rotate(q, positions), rotate(k, positions), v)
            x = x + attended.flatten(-2) @ layer["out"].T
            x = x + silu(rms_norm(x, (WIDTH,)) @ layer["up"].T) @ layer["down"].T
        return rms_norm(x, (WIDTH,)) @ self.embedding.T * WIDTH**-0.5


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on [R, n, heads, D]."""
    frequencies = 1000 ** (-torch.arange(0, 1, 2 / HEAD_SIZE))
    angles = (positions[..., None] * frequencies)[:, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def step(model, caches, ids: Tensor, lens: Tensor | None = None, *, shared=False) -> Tensor:
    """Logits [R, VOCAB] after ids [R, n]: a new shared level, or own tokens of the rows."""

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shared:
            caches[i].append_shared(k, v, lens)
            return caches[i].attend_shared(q)
        caches[i].extend(k, v, lens)
        return caches[i].attend(q, lens)

    first = caches[0].lengths(len(ids) if shared else None)
    logits = model(ids, first[:, None] + torch.arange(ids.shape[1]), attend)
    last = ids.shape[1] - 1 if lens is None else lens - 1
    return logits[torch.arange(len(ids)), last]


def generate(model, outer, rounds, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [ROUNDS, new, B] and their logits, from the loop with `SharedCache`."""
    batch = PROBLEMS[0] * SAMPLES
    caches = [SharedCache(batch, NEW_TOKENS, KV_HEADS, HEAD_SIZE) for _ in range(LAYERS)]
    tokens, scores = [], []
    for ids, lens in outer:
        step(model, caches, ids, lens, shared=True)
    for (ids, lens), sampling in zip(rounds, noise, strict=True):
        logits = step(model, caches, ids, lens, shared=True).repeat_interleave(SAMPLES, 0)
        for gumbel in sampling:
            scores.append(logits)
            tokens.append((logits + gumbel).argmax(-1))
            logits = step(model, caches, tokens[-1][:, None])
        for cache in caches:
            cache.wipe(keep=len(outer))
    shape = (len(rounds), NEW_TOKENS, batch)
    return torch.stack(tokens).view(shape), torch.stack(scores).view(*shape, VOCAB)


def generate_plain(model, prompt: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and logits of one row without sharing: prompt [n], sampling [new, VOCAB]."""
    past: list[tuple[Tensor, Tensor] | None] = [None] * LAYERS

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if past[i] is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past[i], (k, v), strict=True))
        past[i] = k, v
        causal = q.shape[2] > 1
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    logits = model(prompt[None], torch.arange(len(prompt))[None], attend)[0, -1]
    tokens, scores = [], []
    for i, gumbel in enumerate(sampling):
        scores.append(logits)
        tokens.append((logits + gumbel).argmax(-1))
        logits = model(tokens[-1].view(1, 1), torch.tensor([[len(prompt) + i]]), attend)[0, -1]
    return torch.stack(tokens), torch.stack(scores)


def pieces(count: int, most: int) -> tuple[Tensor, Tensor]:
    """Random ids [count, most], padded on the right, and lens [count]."""
    lens = torch.randint(most // 2, most + 1, (count,), dtype=torch.int32)
    return torch.randint(VOCAB, (count, most)), lens


@torch.inference_mode()
def main() -> None:
    """Run both loops and compare them."""
    torch.manual_seed(0)
    model = Model()
    system = torch.randint(VOCAB, (1, SYSTEM)), torch.tensor([SYSTEM], dtype=torch.int32)
    outer = [system, pieces(*FEW_SHOT)]
    rounds = [pieces(*PROBLEMS) for _ in range(ROUNDS)]
    batch = PROBLEMS[0] * SAMPLES
    # Sampling is argmax(logits + Gumbel noise): both loops draw the same way.
    noise = -torch.empty(ROUNDS, NEW_TOKENS, batch, VOCAB).exponential_().log()

    start = time.perf_counter()
    tokens, logits = generate(model, outer, rounds, noise)
    seconds = time.perf_counter() - start
    equal = held = seen = 0
    worst = 0.0
    for r, problems in enumerate(rounds):
        levels = [*outer, problems]
        held += sum(int(lens.sum()) for _, lens in levels)
        for b in range(batch):
            parts = [(ids, lens, b * len(ids) // batch) for ids, lens in levels]
            prompt = torch.cat([ids[row, : lens[row]] for ids, lens, row in parts])
            seen += len(prompt)
            want, scores = generate_plain(model, prompt, noise[r, :, b])
            equal += int((tokens[r, :, b] == want).sum())
            worst = max(worst, float((logits[r, :, b] - scores).abs().max()))

    total = tokens.numel()
    print(
        f"sampled {total} tokens in {seconds:.2f} s: {ROUNDS} rounds of {PROBLEMS[0]} problems x "
        f"{SAMPLES} samples, under {FEW_SHOT[0]} sets of examples and 1 system prompt\n"
        f"a step reads {held // ROUNDS} tokens of shared KV per layer; its {batch} rows see "
        f"{seen // ROUNDS} (mean of the rounds)\n"
        f"against plain attention, row by row: {equal} of {total} tokens equal, largest logit "
        f"difference {worst:.1e} (logits up to {float(logits.abs().max()):.1f})"
    )
    if equal != total or not worst < 1e-3:
        sys.exit("the loops differ")


if __name__ == "__main__":
    main()
