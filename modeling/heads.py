"""Correction heads: small causal models that walk a block left to right and correct its parallel logits.

Each has `step` for decoding (one draft, explicit state) and `block` for training (teacher forced); a test holds them
equal. The confidence feature of the Markov family is its embedding of the previous token.
"""

import torch
from torch import nn


class MarkovHead(nn.Module):
    """DSpark's heads (arXiv 2607.05147, section 3.2): `markov`, `gated` and `rnn`.

    `w1` [V, r] is indexed by target ids, `w2` gives logits of the draft vocabulary [Vd].
    """

    def __init__(self, config):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.correction_head
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint = nn.Linear(2 * rank + hidden, 3 * rank)

    def features(self, prev: torch.Tensor) -> torch.Tensor:
        """[..., r] embedding of the previous tokens [...]."""
        return self.w1(prev)

    def initial(self, embedding: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(embedding) if self.kind == "rnn" else None

    def _rnn(self, memory, e, hidden):
        g, c, o = self.joint(torch.cat([memory, e, hidden], -1)).chunk(3, -1)
        g = torch.sigmoid(g)
        return g * memory + (1 - g) * torch.tanh(c), torch.tanh(o)

    def step(self, memory, prev, hidden, embed, ids=None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bias [B, Vd] of one draft after `prev` [B], backbone state `hidden` [B, D]; and the next memory.

        `ids` [B, C]: draft ids whose bias [B, C] is wanted, instead of all.
        """
        e = self.features(prev)
        if self.kind == "rnn":
            memory, e = self._rnn(self.initial(e) if memory is None else memory, e, hidden)
        elif self.kind == "gated":
            e = torch.sigmoid(self.gate(torch.cat([hidden, e], -1))) * e
        return outputs_of(self.w2, e, ids), memory

    def block(self, prev: torch.Tensor, hidden: torch.Tensor, embed, prime=None) -> torch.Tensor:
        """Biases [..., K, Vd] for previous tokens `prev` [..., K] and states `hidden` [..., K, D].

        `prime` [..., D]: state of an extra slot 0 that only moves the recurrent memory (anchor-is-bonus blocks).
        """
        e = self.features(prev)
        if self.kind == "gated":
            return self.w2(torch.sigmoid(self.gate(torch.cat([hidden, e], -1))) * e)
        if self.kind == "rnn":
            memory, out = self.initial(e[..., 0, :]), []
            if prime is not None:
                memory, _ = self._rnn(memory, e[..., 0, :], prime)
            for k in range(prev.shape[-1]):
                memory, o = self._rnn(memory, e[..., k, :], hidden[..., k, :])
                out.append(o)
            e = torch.stack(out, -2)
        return self.w2(e)


class DominoHead(nn.Module):
    """Domino's causal correction (arXiv 2605.29707): a GRU over token embeddings, then a bottleneck.

    The first `pure_draft_prefix_len` drafts stay uncorrected; the GRU still reads their tokens.
    """

    def __init__(self, config):
        super().__init__()
        hidden, size = config.hidden_size, config.gru_hidden_size
        self.pure = config.pure_draft_prefix_len
        self.gru = nn.GRU(hidden, size, bias=False, batch_first=True)
        self.down = nn.Linear(hidden + size, config.correction_size, bias=False)
        self.up = nn.Linear(config.correction_size, config.draft_vocab_size, bias=False)

    def _bias(self, hidden, state, ids=None):
        return outputs_of(self.up, nn.functional.silu(self.down(torch.cat([hidden, state], -1))), ids)

    def step(self, memory, prev, hidden, embed, ids=None):
        """As [`MarkovHead.step`]; `memory` is (GRU state [1, B, G], drafts so far)."""
        state, count = memory or (None, 0)
        out, state = self.gru(embed(prev[:, None]), state)
        bias = self._bias(hidden, out[:, 0], ids)
        return (bias if count >= self.pure else torch.zeros_like(bias)), (state, count + 1)

    def block(self, prev, hidden, embed, prime=None):
        """As [`MarkovHead.block`]; the GRU never reads slot 0 twice, so `prime` is not used."""
        K = prev.shape[-1]
        out, _ = self.gru(embed(prev.reshape(-1, K)))
        bias = self._bias(hidden, out.reshape(*prev.shape, -1))
        keep = torch.arange(K, device=bias.device) >= self.pure
        return bias * keep[:, None]


def outputs_of(linear: nn.Linear, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """`linear` (without bias) of `x` [B, r], all its outputs or only `ids` [B, C] of each row."""
    return linear(x) if ids is None else (linear.weight[ids] @ x[..., None])[..., 0]


def build_correction_head(config) -> nn.Module | None:
    if config.correction_head == "none":
        return None
    return DominoHead(config) if config.correction_head == "domino" else MarkovHead(config)


def select_memory(memory, rows: torch.Tensor):
    """Rows [R] of any head's memory."""
    if isinstance(memory, tuple):
        return memory[0][:, rows], memory[1]
    return None if memory is None else memory[rows]
