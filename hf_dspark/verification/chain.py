"""Which drafts of a chain are accepted, and the token after them. Every verifier gives exactly the target's law.

Each has two forms of the same verdict. The lazy one asks for scores position by position, because the user's processors
hang on them: `scores_at(i, rows)` gives the target's processed scores [R, V] at draft position i for those rows. It is
called once per row and position, in order, and not past a row's first rejection ("block" needs them all). The dense one
takes the scores of all positions and computes on their device without waiting for it.

A row that meets a position without any possible token ends there, with `possible` False: there is nothing to draw.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .noise import Noise, check_possible, possible, real_dtype


@dataclass
class Verdict:
    """What is accepted of each row's drafts, all on the device of the drafts.

    Args:
        accepted ([A], int64): accepted drafts.
        next_token ([A], int64): the target's token after them.
        possible ([A], bool): whether that token could be drawn; None for greedy verdicts, which need no law.
        path ([A, D], int64): the accepted drafts' places in a tree, from the root; None for a chain, where they are the
            first.
    """

    accepted: torch.Tensor
    next_token: torch.Tensor
    possible: torch.Tensor | None = None
    path: torch.Tensor | None = None

    def read(self, *more: torch.Tensor) -> tuple[list, ...]:
        """Everything the host wants of a round, in one transfer.

        Args:
            more ([A] or [A, n], integer or bool): further facts of the rows that go along.

        Returns:
            `accepted`, `next_token` and each of `more` as (nested) lists of integers.

        Raises:
            ValueError: when a row allows no token at all; its attribute `rows` has the rows.
        """
        able = torch.ones_like(self.accepted) if self.possible is None else self.possible
        parts = [part.to(self.accepted.device, torch.long) for part in (self.accepted, self.next_token, able, *more)]
        rows = torch.cat([part[:, None] if part.dim() == 1 else part for part in parts], 1).tolist()
        lists, start = [], 0
        for part in parts:
            end = start + part[0:1].numel() if rows else start
            lists.append([row[start] if part.dim() == 1 else row[start:end] for row in rows])
            start = end
        accepted, following, able, *rest = lists
        check_possible(able)
        return accepted, following, *rest


def usable(values: torch.Tensor) -> torch.Tensor:
    """Which drafts have a law, bool [A, L], by what each was drawn from: logits, scores or q [A, L, V].

    A drafter may return nan. A row's first such draft and all behind it are none: `lengths.minimum(usable(q).sum(1))`.
    Only the law is looked at, never the token drawn, so lengths cut by this stay exact.
    """
    return possible(values).long().cumprod(1).bool()


# ---------------------------------------------------------------------- laws of acceptance


def acceptance(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Probability [...] of accepting `tokens` [...] under p and q [..., V]: min(1, p/q). `q=None` is a deterministic
    draft (one-hot), accepted with p."""
    p = p.gather(-1, tokens[..., None])[..., 0]
    if q is None:
        return p
    q = q.gather(-1, tokens[..., None])[..., 0]
    return torch.where(p >= q, torch.ones_like(p), p / q.clamp_min(torch.finfo(q.dtype).tiny)) * (p > 0)


def residual(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Mass [R, V] a rejected draft is replaced from: max(p - q, 0), or p where rounding left nothing of it."""
    if q is None:
        mass = p.scatter(-1, tokens[:, None], 0.0)
    else:
        mass = (p - q).clamp_min(0.0)
    return torch.where(mass.sum(-1, keepdim=True) > 0, mass, p)


def block_survival(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, lengths=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification's r_0..r_L [..., L+1] and acceptance thresholds h_1..h_L [..., L] (arXiv 2403.10444).

    `p` [..., L+1, V], `q` [..., L, V], `tokens` [..., L], `lengths` [...] drafts of each row (None: all L). The verdict
    is the largest i with u_i <= h_i, u independent uniforms; r and h behind a row's length mean nothing.
    """
    L = tokens.shape[-1]
    p_x, q_x = (law[..., :L, :].gather(-1, tokens[..., None])[..., 0] for law in (p, q))
    ratio = p_x / q_x.clamp_min(torch.finfo(q.dtype).tiny)
    r = [p.new_ones(p.shape[:-2])]
    for i in range(L):
        r.append((r[i] * ratio[..., i]).clamp_max(1.0))
    r = torch.stack(r, -1)
    inner = r[..., 1:L]
    s = (inner[..., None] * p[..., 1:L, :] - q[..., 1:, :]).clamp_min(0.0).sum(-1)
    below = s + 1 - inner
    h = torch.cat([torch.where(below > 0, s / below, torch.zeros_like(s)), r[..., L:]], -1)[..., :L]
    if lengths is not None:
        last = torch.arange(1, L + 1, device=h.device) == lengths[..., None]
        h = torch.where(last, r[..., 1:], h)
    return r, h


def _block_residual(survival, p, q) -> torch.Tensor:
    """Mass [R, V] behind the accepted drafts: max(r p - q, 0) of survivals [R], or p where rounding left nothing of
    it."""
    mass = (survival[:, None] * p - q).clamp_min(0.0)
    return torch.where(mass.sum(-1, keepdim=True) > 0, mass, p)


def _one_hot(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """q of deterministic drafts `tokens` [...], [..., V] with the vocabulary and type of `like`."""
    return like.new_zeros(*tokens.shape, like.shape[-1]).scatter_(-1, tokens[..., None], 1.0)


# ---------------------------------------------------------------------- dense forms

# scores [A, L+1, V]; tokens [A, L] and q [A, L, V] (None: deterministic drafts), or longer; lengths [A] on the same
# device.


def match_all(scores: torch.Tensor, tokens: torch.Tensor, q, lengths: torch.Tensor, noise: Noise | None) -> Verdict:
    """[`verify_match`] from the scores of all positions [A, L+1, V], `lengths` [A] a tensor; the rest as there."""
    width = scores.shape[1]
    if noise is None:
        chosen, able = scores.argmax(-1), None
    else:
        noise.widen(width)
        chosen, able = noise.sample(scores, None, _places(scores)[None]), possible(scores)
        lengths = _cut(lengths, able)
    hits = (tokens[:, : width - 1] == chosen[:, :-1]) & (_places(scores)[:-1] < lengths[:, None])
    accepted = hits.long().cumprod(1).sum(1)
    return Verdict(accepted, _at(chosen, accepted), None if able is None else _at(able, accepted))


def ratio_all(scores: torch.Tensor, tokens: torch.Tensor, q, lengths: torch.Tensor, noise: Noise) -> Verdict:
    """[`verify_ratio`] from the scores of all positions [A, L+1, V], `lengths` [A] a tensor; the rest as there."""
    L, able = scores.shape[1] - 1, possible(scores)
    noise.widen(L + 1)
    tokens, q, lengths = tokens[:, :L], q if q is None else q[:, :L], _cut(lengths, able)
    p, places = scores.softmax(-1), _places(scores)[:-1]
    hits = (noise.coin(None, places[None], p.device) < acceptance(p[:, :L], q, tokens)) & (places < lengths[:, None])
    accepted = hits.long().cumprod(1).sum(1)
    bonus = noise.sample(_at(scores, accepted), None, accepted)
    if L:
        a = accepted.clamp_max(L - 1)  # a row with all L drafts has the bonus, and no residual
        mass = residual(_at(p, a), None if q is None else _at(q, a), _at(tokens, a))
        bonus = torch.where(accepted < lengths, noise.sample_mass(mass, None, a, "residual"), bonus)
    return Verdict(accepted, bonus, _at(able, accepted))


def block_all(scores: torch.Tensor, tokens: torch.Tensor, q, lengths: torch.Tensor, noise: Noise) -> Verdict:
    """[`verify_block`] from the scores of all positions [A, L+1, V], `lengths` [A] a tensor; the rest as there."""
    L, able = scores.shape[1] - 1, possible(scores)
    noise.widen(L + 1)
    tokens, lengths = tokens[:, :L], _cut(lengths, able)
    p = scores.softmax(-1).to(real_dtype(scores.device))
    q = _one_hot(tokens, p) if q is None else q[:, :L].to(p.dtype)
    survival, h = block_survival(p, q, tokens, lengths)
    places = _places(scores)[:-1]
    passed = (noise.coin(None, places[None], p.device) <= h) & (places < lengths[:, None])
    accepted = (passed * (places + 1)).amax(1) if L else torch.zeros_like(lengths)
    bonus = noise.sample(_at(scores, accepted), None, accepted)
    if L:
        a = accepted.clamp_max(L - 1)
        mass = _block_residual(_at(survival, a), _at(p, a), _at(q, a))
        bonus = torch.where(accepted < lengths, noise.sample_mass(mass, None, a, "residual"), bonus)
    return Verdict(accepted, bonus, _at(able, accepted))


def _places(scores: torch.Tensor) -> torch.Tensor:
    return torch.arange(scores.shape[1], device=scores.device)


def _cut(lengths: torch.Tensor, able: torch.Tensor) -> torch.Tensor:
    """`lengths` [A] up to the first position that has no law by `able` [A, L+1]: a prefix decides it, not the draft
    there."""
    return lengths.minimum(able.long().cumprod(1).sum(1))


def _at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each row's entry of `values` [A, N, ...] at its place [A]."""
    return values[torch.arange(len(values), device=values.device), places]


# ---------------------------------------------------------------------- lazy forms


def verify_match(scores_at: Callable, tokens: torch.Tensor, q, lengths: list[int], noise: Noise | None) -> Verdict:
    """Draw the target's token and accept while it equals the draft. Greedy when `noise` is None.

    Exact for any drafts and any length rule, because the drafts never enter the draw. `tokens` [A, L], `lengths` [A];
    `q` isn't read.
    """
    rows, tally = list(range(len(lengths))), _Tally(tokens)
    for i in range(max(lengths, default=0) + 1):
        scores = scores_at(i, rows)
        if noise is not None:
            rows, scores = tally.drop_impossible(rows, scores)
        if not rows:
            break
        chosen = scores.argmax(-1) if noise is None else noise.sample(scores, rows, i)
        tally.next_token[rows] = chosen = chosen.to(tokens.device)
        hits = (tokens[rows, i] == chosen).tolist() if i < tokens.shape[1] else [False] * len(rows)
        rows = tally.accept([r for r, hit in zip(rows, hits) if hit and i < lengths[r]])
        if not rows:
            break
    return tally.verdict(noise)


def verify_ratio(scores_at: Callable, tokens, q: torch.Tensor | None, lengths: list[int], noise: Noise) -> Verdict:
    """Speculative sampling (arXiv 2211.17192): accept with min(1, p/q), replace the first rejected draft from the
    residual.

    `tokens` [A, L]; `q` [A, L, V] the very distributions they were drawn from, or None for deterministic drafts.
    """
    rows, tally = list(range(len(lengths))), _Tally(tokens)
    for i in range(max(lengths, default=0) + 1):
        rows, scores = tally.drop_impossible(rows, scores_at(i, rows))
        ended = [j for j, r in enumerate(rows) if lengths[r] == i]  # every draft survived: the bonus token
        if ended:
            at = [rows[j] for j in ended]
            tally.next_token[at] = noise.sample(scores[ended], at, i).to(tokens.device)
        live = [j for j, r in enumerate(rows) if lengths[r] > i]
        rows = [rows[j] for j in live]
        if not rows:
            break
        p = scores[live].softmax(-1).to(tokens.device)
        x, q_i = tokens[rows, i], None if q is None else q[rows, i]
        hits = (noise.coin(rows, i, p.device) < acceptance(p, q_i, x)).tolist()
        out = [j for j, hit in enumerate(hits) if not hit]
        if out:
            at = [rows[j] for j in out]
            mass = residual(p[out], None if q is None else q_i[out], x[out])
            tally.next_token[at] = noise.sample_mass(mass, at, i, "residual")
        rows = tally.accept([r for r, hit in zip(rows, hits) if hit])
        if not rows:
            break
    return tally.verdict(noise)


def verify_block(scores_at: Callable, tokens, q: torch.Tensor | None, lengths: list[int], noise: Noise) -> Verdict:
    """Block verification (arXiv 2403.10444): judge the chain as a whole; never accepts less than `verify_ratio` in
    expectation.

    Arguments as in [`verify_ratio`].
    """
    tally, seen = _Tally(tokens), [[] for _ in lengths]
    rows = list(range(len(lengths)))
    for i in range(max(lengths, default=0) + 1):
        rows = [r for r in rows if lengths[r] >= i]
        scores = scores_at(i, rows)
        for r, score in zip(rows, scores):
            seen[r].append(score)
        rows = [r for r, able in zip(rows, possible(scores).tolist()) if able]
    for r, scores in enumerate(seen):
        _judge_block(tally, r, torch.stack(scores), tokens[r], None if q is None else q[r], noise)
    return tally.verdict(noise)


def _judge_block(tally: "_Tally", r: int, scores, tokens, q, noise) -> None:
    """The verdict of row `r` alone, by its scores [L+1, V]; the last of them may be impossible."""
    L = len(scores) - 1
    p, x = scores.softmax(-1).to(tokens.device, real_dtype(tokens.device)), tokens[:L]
    q = _one_hot(x, p) if q is None else q[:L].to(p.dtype)
    survival, h = block_survival(p, q, x)
    passed = [i + 1 for i in range(L) if noise.coin([r], i, p.device)[0] <= h[i]]
    a = tally.accepted[r] = max(passed, default=0)
    if not possible(scores[a]):
        tally.possible[r] = False
    elif a == L:
        tally.next_token[r] = noise.sample(scores[a : a + 1], [r], a)[0]
    else:
        mass = _block_residual(survival[a : a + 1], p[a : a + 1], q[a : a + 1])
        tally.next_token[r] = noise.sample_mass(mass, [r], a, "residual")[0]


class _Tally:
    """A verdict in the making, for the drafts `tokens` [A, L]."""

    def __init__(self, tokens: torch.Tensor):
        self.accepted, self.possible = [0] * len(tokens), [True] * len(tokens)
        self.next_token = tokens.new_zeros(len(tokens))

    def drop_impossible(self, rows: list[int], scores: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Only the `rows` that have something to draw from `scores` [R, V]."""
        able = possible(scores).tolist()
        if all(able):
            return rows, scores
        for r, has in zip(rows, able):
            self.possible[r] = has
        return [r for r, has in zip(rows, able) if has], scores[torch.tensor(able, device=scores.device)]

    def accept(self, rows: list[int]) -> list[int]:
        for r in rows:
            self.accepted[r] += 1
        return rows

    def verdict(self, noise) -> Verdict:
        device = self.next_token.device
        able = None if noise is None else torch.tensor(self.possible, dtype=torch.bool, device=device)
        return Verdict(torch.tensor(self.accepted, dtype=torch.long, device=device), self.next_token, able)
