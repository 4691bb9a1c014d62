"""Tiny models in float64 for exactness tests: random targets of many architectures, random drafters, scripted drafters.

Weights are drawn wide (std 0.3), because default initialisation makes logits so flat that tests see nothing.
"""

import functools
import inspect
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hf_dspark import DSparkConfig, DSparkDrafter, SpeculationConfig
from hf_dspark.modeling import Eagle3Config, Eagle3Drafter, MTPConfig, MTPDrafter
from hf_dspark.modeling.draft_cache import DraftCache

# transformers 5.24 calls it cache; the older name is then deprecated.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
V, HIDDEN, LAYERS, WINDOW = 61, 32, 3, 6
PAD, BOS = 0, 1
BODY = dict(
    vocab_size=V,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=256,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=None,
)
GQA = dict(num_key_value_heads=2, head_dim=8)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
TARGETS = {
    "llama": ("llama", "sdpa", GQA),
    "llama tied eager": ("llama", "eager", dict(**GQA, tie_word_embeddings=True, attention_bias=True)),
    "qwen3 tied": ("qwen3", "sdpa", dict(**GQA, tie_word_embeddings=True)),
    "qwen2 windows": ("qwen2", "eager", dict(
        **GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1,
    )),
    "mistral window": ("mistral", "sdpa", dict(**GQA, sliding_window=WINDOW)),
    "gemma2": ("gemma2", "eager", dict(
        **GQA, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8, final_logit_softcapping=5.0,
        attn_logit_softcapping=4.0, tie_word_embeddings=False,
    )),
    "gemma3": ("gemma3_text", "sdpa", dict(**GQA, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8)),
    "gpt_neox": ("gpt_neox", "sdpa", dict(rotary_pct=0.5)),
    "phi": ("phi", "eager", dict(partial_rotary_factor=0.5, num_key_value_heads=4)),
    "gpt2": ("gpt2", "sdpa", {}),
    "gpt_oss": ("gpt_oss", "eager", dict(
        **GQA, num_local_experts=3, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=MIXED,
    )),
    "qwen3_moe": ("qwen3_moe", "sdpa", dict(
        **GQA, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    )),
}  # fmt: skip


def redraw(model, seed: int, std: float = 0.3):
    """The model in float64 with every parameter drawn anew, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            scale = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            p.data = 1 + 0.2 * noise if scale else std * noise
    return model.double().eval()


def make_target(model_type="llama", attention="sdpa", seed=1, **changes):
    config = AutoConfig.for_model(model_type, **{**BODY, **changes})
    target = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    return redraw(target, seed)


def make_drafter(target, seed=2, **changes):
    """A random DSpark drafter bound to `target`; random drafts are right about once in `V` times."""
    text = target.config.get_text_config()
    body = dict(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, block_size=5, mask_token_id=text.vocab_size - 1,
        target_layer_ids=[0, 1], num_target_layers=text.num_hidden_layers, correction_head="markov", markov_rank=6,
        confidence_head=True,
    )  # fmt: skip
    return _built(DSparkDrafter, DSparkConfig(**{**body, **changes}), seed).bind(target)


def make_eagle3(target, seed=2, **changes):
    text = target.config.get_text_config()
    body = dict(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, chain_length=4, target_layer_ids=[0, 1],
        num_target_layers=text.num_hidden_layers,
    )  # fmt: skip
    return _built(Eagle3Drafter, Eagle3Config(**{**body, **changes}), seed).bind(target)


def make_mtp(target, seed=2, heads=1, block=None, **changes):
    """Random multi-token-prediction heads, by default with small Llama blocks."""
    text = target.config.get_text_config()
    block = {
        **dict(
            model_type="llama", vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=40,
            num_hidden_layers=heads, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ),
        **(block or {}),
    }  # fmt: skip
    body = dict(num_target_layers=text.num_hidden_layers, chain_length=4 if heads == 1 else None)
    return _built(MTPDrafter, MTPConfig(block, **{**body, **changes}), seed).bind(target)


def _built(cls, config, seed):
    drafter = redraw(cls(config), seed)
    if hasattr(drafter, "d2t"):  # an irregular vocabulary: every id but the first few, spread out
        ids = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))
        ids = ids[: config.draft_vocab_size].sort().values
        drafter.d2t.copy_(ids - torch.arange(len(ids)))
    return drafter


# ---------------------------------------------------------------------- scripted drafters


class ScriptedCache(DraftCache):
    """Knows each row's tokens as `extend` told them, all but the first."""

    def __init__(self, first):
        super().__init__(0, first)
        self.tokens: list[list[int]] = [[] for _ in first]

    def select(self, rows, length=None):
        new = ScriptedCache(self.first[rows.cpu()])
        new.lengths, new.tokens = self.lengths[rows.cpu()], [self.tokens[r][:length] for r in rows.tolist()]
        return new

    def share(self):
        return self.select(torch.arange(len(self.tokens)))

    def keep(self, order):
        super().keep(order)
        self.tokens = [self.tokens[r] for r in order]

    def append(self, other):
        super().append(other)
        self.tokens = self.tokens + other.tokens


class ScriptedState:
    def __init__(self, plans, pseudo, k=0):
        self.plans, self.pseudo, self.k = plans, pseudo, k

    def select(self, rows):
        return ScriptedState([self.plans[r] for r in rows.tolist()], self.pseudo[rows], self.k)


class Scripted:
    """A drafter that obeys the protocol and drafts what `plan` says.

    Args:
        plan: `plan(prefix, round) -> tokens` for the next `block` tokens after the committed and drafted `prefix`
            (without the prompt's first token), in the row's `round`-th drafting stage. block: drafts per stage.
        sharpness: logit of the planned token above the others. confidence: `confidence(k) -> logit`, or None.
    """

    is_hf_drafter, device, dtype = True, torch.device("cpu"), torch.float64

    def __init__(self, plan, block=7, taps=(0, 1), vocab=V, sharpness=40.0, confidence=None):
        self.config = DSparkConfig(vocab_size=vocab, target_layer_ids=list(taps), block_size=block)
        self.plan, self.sharpness, self.confidence = plan, sharpness, confidence
        self.speculation, self.last_speculation = SpeculationConfig(), None
        self.features: list[torch.Tensor] = []

    def bind(self, target):
        return self

    def new_cache(self, first_positions):
        return ScriptedCache(first_positions)

    def expected_length(self, committed):
        return committed - 1

    def extend(self, cache, features, next_tokens, valid):
        self.features.append(features)
        for tokens, new, keep in zip(cache.tokens, next_tokens, valid):
            assert keep.tolist() == sorted(keep.tolist(), reverse=True), "valid marks a prefix"
            tokens.extend(new[keep].tolist())
        cache.advance(valid.sum(1).cpu())

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        if pseudo is not None:
            cache.advance(pseudo.shape[1])
        block, plans = self.config.max_block, []
        for row, last in enumerate(anchor.tolist()):
            prefix = cache.tokens[row]
            ahead = int(cache.lengths[row]) - len(prefix)
            if ahead == 0:
                assert not prefix or prefix[-1] == last, "the anchor is the last committed token"
            plan = self.plan(prefix, ahead)
            plans.append(plan[ahead : ahead + block])
        return ScriptedState(plans, torch.zeros(len(anchor), block, 1))

    def step(self, cache, state, prev):
        logits = torch.zeros(len(state.plans), self.config.vocab_size)
        for row, plan in enumerate(state.plans):
            logits[row, plan[state.k] if state.k < len(plan) else PAD] = self.sharpness
        confidence = None if self.confidence is None else torch.full((len(logits),), self.confidence(state.k))
        return logits, confidence, ScriptedState(state.plans, state.pseudo, state.k + 1)

    def target_ids(self, draft_ids=None):
        return torch.arange(self.config.vocab_size) if draft_ids is None else draft_ids


class Twin(Scripted):
    """Drafts from the target's own law, blurred: what a good drafter does when sampling.

    Args:
        prompts: those of the call, as `extend` doesn't tell a row's first token. noise: spread of the blur on logits.
    """

    def __init__(self, target, prompts, noise=0.5, **kwargs):
        super().__init__(plan=None, vocab=target.config.get_text_config().vocab_size, **kwargs)
        self.target, self.prompts = target, [p.tolist() for p in prompts]
        generator = torch.Generator().manual_seed(9)
        self.blur = noise * torch.randn(16, self.config.vocab_size, generator=generator)

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        if pseudo is not None:
            cache.advance(pseudo.shape[1])
        return ScriptedState([[] for _ in anchor], torch.zeros(len(anchor), self.config.max_block, 1))

    def step(self, cache, state, prev):
        logits = []
        for row, (tokens, ahead) in enumerate(zip(cache.tokens, state.plans)):
            if state.k or int(cache.lengths[row]) > len(tokens):
                ahead.append(int(prev[row]))
            first = next(p[0] for p in self.prompts if p[1:] == tokens[: len(p) - 1])
            ids = torch.tensor([[first, *tokens, *ahead]])
            with torch.no_grad():
                logits.append(self.target(ids, use_cache=False).logits[0, -1].float() + self.blur[ids.shape[1] % 16])
        confidence = None if self.confidence is None else torch.full((len(logits),), self.confidence(state.k))
        return torch.stack(logits), confidence, ScriptedState(state.plans, state.pseudo, state.k + 1)


class Steered:
    """A real drafter with its real cache, whose drafts are right as often as told.

    Wants to be shown every round's `context` by a patched `Proposer.propose`, as a drafter itself doesn't know its
    rows.

    Args:
        sequences: the rows' texts. accept: right drafts of each row's first, second, ... round (cyclic); or per row.
    """

    is_hf_drafter = True

    def __init__(self, drafter, sequences, accept):
        self.drafter, self.sequences = drafter, sequences
        self.accept = accept if isinstance(accept[0], list) else [accept] * len(sequences)
        self.speculation, self.last_speculation = SpeculationConfig(), None
        self.rounds, self.context = [0] * len(sequences), None

    def __getattr__(self, name):
        return getattr(self.__dict__["drafter"], name)

    def show(self, context):
        self.context, self.right = context, {}
        for row, n in zip(context.rows, context.lengths):
            script = self.accept[row]
            self.right[row] = n + script[self.rounds[row] % len(script)]
            self.rounds[row] += 1

    def _token(self, i, row, place):
        """What was committed there, or is drafted in this round."""
        if place < self.context.lengths[i]:
            return int(self.context.ids[i, place])
        token = self.sequences[row][place]
        return token if place < self.right[row] else wrong(token)

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        ahead = 0 if pseudo is None else 1 if self.drafter.config.recursive else pseudo.shape[1]
        places, self.plans, left = cache.first + cache.lengths + 1 + ahead, [], list(enumerate(self.context.rows))
        for n, last in zip(places.tolist(), anchor.tolist()):
            i, row = next(x for x in left if self._token(*x, n - 1) == last)
            left.remove((i, row))
            text = self.sequences[row]
            self.plans.append([t if p < self.right[row] else wrong(t) for p, t in enumerate(text) if p >= n])
        return self.drafter.start(cache, anchor, seed, pseudo, length)

    def step(self, cache, state, prev):
        k = state.k
        logits, confidence, state = self.drafter.step(cache, state, prev)
        tokens = torch.tensor([plan[k] if k < len(plan) else PAD for plan in self.plans])
        return logits.scatter_add(1, tokens[:, None], torch.full_like(logits[:, :1], 1e4)), confidence, state


def continuation(sequences, prefix):
    """What the known `sequences` (prompt and text) say after `prefix`, which lacks its first tokens."""
    for s in sequences:
        n = len(prefix) + 1
        if s[1:n] == prefix:
            return s[n:]
    return []


def wrong(token: int) -> int:
    return (token + 1) % V


def oracle(sequences, **kwargs):
    """Drafts each row's own known text: wins every round."""
    return Scripted(lambda prefix, ahead: continuation(sequences, prefix), **kwargs)


def always_wrong(sequences, **kwargs):
    return Scripted(lambda prefix, ahead: [wrong(t) for t in continuation(sequences, prefix)], **kwargs)


def good(sequences, **kwargs):
    """Right about three times in four, by a hash of the position."""

    def plan(prefix, ahead):
        start = len(prefix)
        text = continuation(sequences, prefix)
        return [wrong(t) if (start + k) * 2654435761 % 2**32 < 2**30 else t for k, t in enumerate(text)]

    return Scripted(plan, **kwargs)


def accepting(sequences, lengths, **kwargs):
    """Whose rounds accept `lengths[0]`, `lengths[1]`, ... drafts in turn, whatever the row."""
    rounds: dict[int, list[int]] = {}

    def plan(prefix, ahead):
        text = continuation(sequences, prefix)
        row = next(i for i, s in enumerate(sequences) if s[1 : len(prefix) + 1] == prefix)
        seen = rounds.setdefault(row, [])
        if len(prefix) not in seen:
            seen.append(len(prefix))
        right = lengths[seen.index(len(prefix)) % len(lengths)]
        return text[:right] + [wrong(t) for t in text[right:]]

    return Scripted(plan, **kwargs)


def constant(token, **kwargs):
    return Scripted(lambda prefix, ahead: [token] * 64, **kwargs)


# ---------------------------------------------------------------------- cases


@dataclass
class Case:
    """A target, prompts of several lengths, and what plain greedy decoding makes of each on its own."""

    target: torch.nn.Module
    prompts: list[torch.Tensor]
    texts: list[list[int]]

    @property
    def new(self) -> list[list[int]]:
        """The generated parts."""
        return [text[len(p) :] for text, p in zip(self.texts, self.prompts)]

    def padded(self, side="left") -> dict:
        """The prompts as one batch for `generate`."""
        return padded(self.prompts, side)


LENGTHS, NEW = [9, 5, 7, 3], 14


def padded(prompts, side="left") -> dict:
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), PAD), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, p in enumerate(prompts):
        where = slice(width - len(p), width) if side == "left" else slice(0, len(p))
        ids[row, where], mask[row, where] = p, 1
    return dict(input_ids=ids, attention_mask=mask)


@functools.cache
def load_case(name: str) -> Case:
    """One per session: never change its target."""
    model_type, attention, changes = TARGETS[name]
    target = make_target(model_type, attention, **changes)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, V - 1, (n,), generator=generator) for n in LENGTHS]
    texts = [plain(target, p, max_new_tokens=NEW) for p in prompts]
    return Case(target, prompts, texts)


def plain(target, prompt, **kwargs) -> list[int]:
    """Greedy `generate` without a drafter of one prompt."""
    ids = prompt[None]
    return target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **kwargs)[0].tolist()


def generated(output, width: int, lengths) -> list[list[int]]:
    """New tokens of each row of a generate call over `width` prompt columns, cut to `lengths`; the rest must be
    pads."""
    rows = []
    for row, n in zip(output[:, width:].tolist(), lengths):
        assert row[n:] == [PAD] * (len(row) - n), "an ended row emits pads"
        rows.append(row[:n])
    return rows
