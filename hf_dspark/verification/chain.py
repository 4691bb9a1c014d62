"""Which drafts of a chain are accepted, and the token after them. Every verifier gives exactly the target's law.

`scores_at(i, rows)` gives the target's processed scores [R, V] at draft position i for those rows. It is called once per row
and position, in order, and not past a row's first rejection ("block" needs them all), because user processors hang on it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .noise import check_possible, keyed_scores, uniforms


@dataclass
class Noise:
    """Keyed noise of the active rows in one round.

    `streams` [A]; `indices` [A], the generated-token index at draft position 0, which also tells rounds apart.
    """

    seed: int
    streams: list[int]
    indices: list[int]

    def select(self, rows: list[int]) -> "Noise":
        """The noise of rows [R] alone."""
        return Noise(self.seed, [self.streams[r] for r in rows], [self.indices[r] for r in rows])

    def _at(self, rows, i, domain) -> dict:
        start = [self.indices[r] for r in rows]
        rounds = None if domain == "target" else start
        return dict(
            seed=self.seed,
            streams=[self.streams[r] for r in rows],
            indices=[n + i for n in start],
            domain=domain,
            rounds=rounds,
        )

    def sample(self, scores: torch.Tensor, rows: list[int], i: int, domain: str = "target") -> torch.Tensor:
        """A draw [R] from softmax(scores [R, V])."""
        return keyed_scores(scores, **self._at(rows, i, domain)).argmax(-1)

    def sample_mass(self, mass: torch.Tensor, rows: list[int], i: int, domain: str) -> torch.Tensor:
        """A draw [R] from unnormalised probabilities [R, V]: the first id whose cumulative mass exceeds a uniform's share."""
        upto = mass.double().cumsum(-1)
        share = uniforms(**self._at(rows, i, domain), size=1, device=mass.device) * upto[:, -1:]
        return torch.searchsorted(upto, share, right=True)[:, 0]

    def coin(self, rows: list[int], i: int, device) -> torch.Tensor:
        """Uniforms [R] for accepting draft i."""
        return uniforms(**self._at(rows, i, "coin"), size=1, device=device)[:, 0]


@dataclass
class Verdict:
    """`accepted` [A] drafts of each row, and `next_token` [A], the target's token after them."""

    accepted: torch.Tensor
    next_token: torch.Tensor


def verify_match(scores_at: Callable, tokens: torch.Tensor, lengths: list[int], noise: Noise | None) -> Verdict:
    """Draw the target's token and accept while it equals the draft. Greedy when `noise` is None.

    Exact for any drafts and any length rule, because the drafts never enter the draw. `tokens` [A, L], `lengths` [A].
    """
    accepted = [0] * len(lengths)
    next_token = torch.zeros(len(lengths), dtype=torch.long, device=tokens.device)
    alive = list(range(len(lengths)))
    for i in range(max(lengths, default=0) + 1):
        scores = scores_at(i, alive)
        chosen = scores.argmax(-1) if noise is None else noise.sample(scores, alive, i)
        chosen = chosen.to(tokens.device)
        next_token[alive] = chosen
        hits = (tokens[alive, i] == chosen).tolist() if i < tokens.shape[1] else [False] * len(alive)
        alive = [r for r, hit in zip(alive, hits) if hit and i < lengths[r]]
        for r in alive:
            accepted[r] += 1
        if not alive:
            break
    return Verdict(torch.tensor(accepted), next_token)


def acceptance(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Probability [R] of accepting `tokens` [R]: min(1, p/q). `q=None` is a deterministic draft (one-hot), accepted with p."""
    p = p.gather(-1, tokens[:, None])[:, 0]
    if q is None:
        return p
    q = q.gather(-1, tokens[:, None])[:, 0]
    return torch.where(p >= q, torch.ones_like(p), p / q.clamp_min(torch.finfo(q.dtype).tiny)) * (p > 0)


def residual(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Mass [R, V] a rejected draft is replaced from: max(p - q, 0), or p where rounding left nothing of it."""
    if q is None:
        mass = p.scatter(-1, tokens[:, None], 0.0)
    else:
        mass = (p - q).clamp_min(0.0)
    return torch.where(mass.sum(-1, keepdim=True) > 0, mass, p)


def verify_ratio(scores_at: Callable, tokens, q: torch.Tensor | None, lengths: list[int], noise: Noise) -> Verdict:
    """Speculative sampling (arXiv 2211.17192): accept with min(1, p/q), replace the first rejected draft from the residual.

    `tokens` [A, L]; `q` [A, L, V] the very distributions they were drawn from, or None for deterministic drafts.
    """
    accepted = [0] * len(lengths)
    next_token = torch.zeros(len(lengths), dtype=torch.long, device=tokens.device)
    alive = list(range(len(lengths)))
    for i in range(max(lengths, default=0) + 1):
        scores = scores_at(i, alive)
        done = [j for j, r in enumerate(alive) if lengths[r] == i]  # every draft survived: the bonus token
        if done:
            rows = [alive[j] for j in done]
            next_token[rows] = noise.sample(scores[done], rows, i).to(tokens.device)
        live = [j for j, r in enumerate(alive) if lengths[r] > i]
        alive = [alive[j] for j in live]
        if not alive:
            break
        check_possible(scores[live])
        p = scores[live].softmax(-1).to(tokens.device)
        x, q_i = tokens[alive, i], None if q is None else q[alive, i]
        hits = (noise.coin(alive, i, p.device) < acceptance(p, q_i, x)).tolist()
        out = [j for j, hit in enumerate(hits) if not hit]
        if out:
            rows = [alive[j] for j in out]
            mass = residual(p[out], None if q is None else q_i[out], x[out])
            next_token[rows] = noise.sample_mass(mass, rows, i, "residual")
        alive = [r for r, hit in zip(alive, hits) if hit]
        for r in alive:
            accepted[r] += 1
        if not alive:
            break
    return Verdict(torch.tensor(accepted), next_token)


def block_survival(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification's r_0..r_L [L+1] and acceptance thresholds h_1..h_L [L] for one row (arXiv 2403.10444).

    `p` [L+1, V], `q` [L, V], `tokens` [L]. The verdict is the largest i with u_i <= h_i, u independent uniforms.
    """
    L, r = len(tokens), [p.new_ones(())]
    for i in range(L):
        x = tokens[i]
        r.append((r[-1] * p[i, x] / q[i, x]).clamp_max(1.0) if p[i, x] > 0 else p.new_zeros(()))
    thresholds = []
    for i in range(1, L + 1):
        if i == L:
            thresholds.append(r[L])
            continue
        s = (r[i] * p[i] - q[i]).clamp_min(0.0).sum()
        below = s + 1 - r[i]
        thresholds.append(s / below if below > 0 else torch.zeros_like(s))
    return torch.stack(r), torch.stack(thresholds) if thresholds else p.new_zeros(0)


def verify_block(scores_at: Callable, tokens, q: torch.Tensor | None, lengths: list[int], noise: Noise) -> Verdict:
    """Block verification: judge the chain as a whole; never accepts less than `verify_ratio` in expectation.

    Arguments as in [`verify_ratio`].
    """
    rows = list(range(len(lengths)))
    per_position = []
    for i in range(max(lengths, default=0) + 1):
        alive = [r for r in rows if lengths[r] >= i]
        per_position.append(dict(zip(alive, scores_at(i, alive))))
    accepted, next_token = [], torch.zeros(len(lengths), dtype=torch.long, device=tokens.device)
    for r in rows:
        L = lengths[r]
        scores = torch.stack([per_position[i][r] for i in range(L + 1)])
        check_possible(scores)
        p, x = scores.softmax(-1).double().to(tokens.device), tokens[r, :L]
        q_r = torch.nn.functional.one_hot(x, p.shape[-1]) if q is None else q[r, :L]
        q_r = q_r.to(p.dtype)
        survival, h = block_survival(p, q_r, x)
        coins = torch.stack([noise.coin([r], i, p.device)[0] for i in range(L)]) if L else h
        passed = (coins <= h).nonzero()
        a = int(passed[-1]) + 1 if len(passed) else 0
        accepted.append(a)
        if a == L:
            next_token[r] = noise.sample(scores[a : a + 1], [r], a)[0]
        else:
            mass = (survival[a] * p[a] - q_r[a]).clamp_min(0.0)
            next_token[r] = noise.sample_mass((mass if mass.sum() > 0 else p[a])[None], [r], a, "residual")[0]
    return Verdict(torch.tensor(accepted), next_token)
