"""What every drafter promises, whatever its family, head and vocabulary, under every verifier and engine."""

import functools

import pytest
import tiny
import torch
import transformers
from packaging.version import Version
from tiny import generated, padded
from transformers import GenerationConfig

from hf_dspark import AutoDrafter, SpeculationConfig, keyed_processors
from hf_dspark.drafting.proposer import Proposer

V, NEW = 9, 10  # so few tokens that random drafters are right now and then
OWN = dict(own_embedding=True, own_head=True)
FAMILIES = {
    "dspark": dict(),
    "dspark, gated, no anchor slot": dict(correction_head="gated", sample_from_anchor=False, block_size=5),
    "dspark, rnn, no anchor slot": dict(correction_head="rnn", sample_from_anchor=False, block_size=5),
    "dspark, rnn, reduced": dict(correction_head="rnn", draft_vocab_size=6),
    "dspark, windows": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=3, causal_block=False),
    "dspark, own, reduced": dict(**OWN, draft_vocab_size=6, confidence_with_markov=False),
    "dflash": dict(correction_head="none", confidence_head=False),
    "dflash, no anchor slot, own": dict(
        **OWN, correction_head="none", confidence_head=False, sample_from_anchor=False, block_size=5
    ),
    "domino": dict(
        correction_head="domino", gru_hidden_size=6, correction_size=5, pure_draft_prefix_len=1, confidence_head=False
    ),
    "eagle3": dict(),
    "eagle3, reduced, own, deep": dict(**OWN, draft_vocab_size=6, num_hidden_layers=2),
    "eagle3.1": dict(norm_output=True, norm_before_fc=True, position_offset=1, qk_norm=False),
    "mtp": dict(),
    "mtp, raw states, own, reduced": dict(
        **OWN, draft_vocab_size=6, hidden_first=True, norm_output=False, tap_final_norm=False
    ),
    "mtp, window and experts": dict(
        block=dict(
            model_type="mixtral",
            num_local_experts=3,
            num_experts_per_tok=2,
            sliding_window=3,
            layer_types=["sliding_attention"],
        )
    ),
    "mtp, three heads": dict(heads=3),
}
ENGINES = ["own"] if Version(transformers.__version__) < Version("5.18") else ["own", "stock"]
CALLS = [pytest.param(engine, rows, id=f"{engine}-{rows}") for engine in ENGINES for rows in (1, 3)]
CALLS = [call for call in CALLS if call.values != ("stock", 3)]  # transformers' loop takes one row


@functools.cache
def target():
    return tiny.make_target(vocab_size=V, num_hidden_layers=2, seed=4, **tiny.GQA)


def make(family, seed=6):
    if family.startswith("mtp"):
        return tiny.make_mtp(target(), seed=seed, **FAMILIES[family])
    options = {"target_layer_ids": [0, -1], **FAMILIES[family]}
    if family.startswith("eagle3"):
        return tiny.make_eagle3(target(), seed=seed, **options)
    return tiny.make_drafter(target(), seed=seed, **{"block_size": 4, **options})


@functools.cache
def drafter(family):
    return make(family)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def prompts(rows):
    return [torch.tensor(p) for p in ([3, 4, 5, 6, 7], [8, 3], [5, 5, 4, 7])][:rows]


@functools.cache
def plain(rows, seed=None, **options):
    """New tokens of each row of plain decoding, keyed where a seed is given."""
    batch = padded(prompts(rows))
    width = batch["input_ids"].shape[1]
    processors = None if seed is None else keyed_processors(GenerationConfig(temperature=0.8), seed, width)
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    out = target().generate(
        **batch, **options, do_sample=False, logits_processor=processors, max_new_tokens=NEW, pad_token_id=tiny.PAD
    )
    return out[:, width:].tolist()


def ours(family_or_drafter, engine, rows, **options):
    knobs = {k: options.pop(k) for k in list(options) if k in SpeculationConfig.__dataclass_fields__}
    batch = padded(prompts(rows))
    one = drafter(family_or_drafter) if isinstance(family_or_drafter, str) else family_or_drafter
    out = target().generate(
        **batch, **{"do_sample": False, **options}, max_new_tokens=NEW, pad_token_id=tiny.PAD, assistant_model=one,
        speculation=SpeculationConfig(engine=engine, **knobs),
    )  # fmt: skip
    return out[:, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(("engine", "rows"), CALLS)
def test_greedy_text_is_plain_text(family, engine, rows):
    for verification in ("ratio", "match", "block") if rows > 1 else ("ratio",):
        assert ours(family, engine, rows, verification=verification) == plain(rows)


@pytest.mark.parametrize(("engine", "rows"), CALLS)
def test_matched_samples_are_keyed_samples(family, engine, rows):
    accepted = 0
    for seed in (1, 2) if rows == 1 else (1,):
        assert ours(
            family, engine, rows, do_sample=True, temperature=0.8, verification="match", seed=seed
        ) == plain(rows, seed)  # fmt: skip
        accepted += sum(map(sum, drafter(family).last_speculation.acceptance_lengths)) - sum(
            map(len, drafter(family).last_speculation.acceptance_lengths)
        )
    assert accepted, "some drafts are right"


@pytest.mark.parametrize("verification", ["ratio", "block"])
def test_ratio_and_block_repeat_with_a_seed_and_are_greedy_when_cold(family, verification):
    args = dict(do_sample=True, verification=verification, seed=3)
    assert ours(family, "own", 3, **args, temperature=1e-4) == plain(3)
    hot = ours(family, "own", 3, **args, temperature=1.5)
    assert hot == ours(family, "own", 3, **args, temperature=1.5)
    assert hot != ours(family, "own", 3, **{**args, "seed": 4}, temperature=1.5)


@pytest.mark.skipif("stock" not in ENGINES, reason="no stock engine in this release")
def test_transformers_own_loop_is_greedy_when_cold_and_has_no_block_verification(family):
    assert ours(family, "stock", 1, do_sample=True, temperature=1e-4) == plain(1)
    with pytest.raises(ValueError, match="no block verification"):
        ours(family, "stock", 1, do_sample=True, verification="block")


@pytest.mark.parametrize(("engine", "rows"), CALLS)
def test_texts_end_at_stop_tokens(family, engine, rows):
    for stops in ((plain(rows)[0][3],), (plain(rows)[0][5], plain(rows)[-1][2])):
        assert ours(family, engine, rows, eos_token_id=list(stops)) == plain(rows, eos_token_id=stops)


@pytest.mark.parametrize(("engine", "rows"), CALLS)
def test_eight_stages_change_nothing(family, engine, rows):
    stages = dict(max_draft_stages=8, num_draft_tokens=2)
    args = dict(do_sample=True, temperature=0.8, verification="match", seed=1, loop_gate=-3.0, **stages)
    assert ours(family, engine, rows, **args) == plain(rows, 1)
    assert ours(family, engine, rows, loop_gate=-1e9, **stages) == plain(rows)
    assert max(map(max, drafter(family).last_speculation.draft_stages)) == 4, "two drafts each, and room for eight"


@pytest.mark.parametrize(("engine", "rows"), CALLS)
def test_thresholds_cut_drafts_and_nothing_else(family, engine, rows):
    if not drafter(family).config.confidence_head:
        with pytest.raises(ValueError, match="confidence_threshold"):
            ours(family, engine, rows, confidence_threshold=0.5)
        return
    lengths = []
    for threshold in (0.0, 0.6, 1.0):
        assert ours(family, engine, rows, confidence_threshold=threshold) == plain(rows)
        lengths.append(sum(map(sum, drafter(family).last_speculation.draft_lengths)))
    assert lengths[0] >= lengths[1] >= lengths[2] == 0 < lengths[0]


# ---------------------------------------------------------------------- files and dtypes


@pytest.fixture
def drafts(monkeypatch):
    """Runs a greedy batch and returns every draft's token and log-probability."""
    seen, propose = [], Proposer.propose

    def recording(self, context):
        draft = propose(self, context)
        seen.append((draft.tokens.tolist(), draft.log_q.tolist(), draft.lengths))
        return draft

    monkeypatch.setattr(Proposer, "propose", recording)

    def run(one):
        seen.clear()
        assert ours(one, "own", 3) == plain(3)
        return list(seen)

    return run


def test_a_saved_drafter_drafts_bit_for_bit_as_before(family, tmp_path, drafts):
    one = make(family)
    one.speculation = SpeculationConfig(num_draft_tokens=3, seed=5)
    before = drafts(one)
    one.save_pretrained(tmp_path)
    for again in (
        type(one).from_pretrained(tmp_path, dtype=torch.float64).eval(),
        AutoDrafter.from_pretrained(tmp_path, target=target()),
    ):
        assert again.speculation == SpeculationConfig(num_draft_tokens=3), "a seed belongs to a call"
        assert drafts(again) == before
    other = make(family, seed=8)
    assert drafts(other) != before


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
)
def test_dtypes_may_differ(family, target_dtype, drafter_dtype):
    moved = tiny.make_target(vocab_size=V, num_hidden_layers=2, seed=4, **tiny.GQA).to(target_dtype)
    one = make(family).bind(moved).to(drafter_dtype)
    for options in (dict(do_sample=False), dict(do_sample=True, temperature=0.9)):
        out = moved.generate(**padded(prompts(3)), **options, assistant_model=one, max_new_tokens=NEW)
        assert out.shape == (3, 5 + NEW) and 0 <= out.min() and out.max() < V
    if target_dtype == torch.float32:
        args = dict(do_sample=False, max_new_tokens=NEW)
        out = moved.generate(**padded(prompts(3)), **args, assistant_model=one)
        assert generated(out, 5, [NEW] * 3) == moved.generate(**padded(prompts(3)), **args)[:, 5:].tolist()
