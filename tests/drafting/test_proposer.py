"""What the proposer says about its drafts: the very laws they were drawn from, their confidences, and where they
end."""

import pytest
import tiny
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import RepetitionPenaltyLogitsProcessor

from hf_dspark import DSparkConfig, SpeculationConfig
from hf_dspark.drafting.proposer import Context, Proposer, Sampling
from hf_dspark.modeling.draft_cache import DraftCache
from hf_dspark.verification.chain import Noise
from hf_dspark.verification.probabilities import Scorer

V, K = 12, 4


class Stub:
    """Drafts from fixed logits [K, V] in any dtype, whatever came before; confidences [B, K] as logits."""

    device = torch.device("cpu")

    def __init__(self, logits, confidence=None, d2t=None):
        self.config = DSparkConfig(vocab_size=V, draft_vocab_size=logits.shape[-1], block_size=len(logits))
        self.logits, self.confidence = logits, confidence
        if d2t is not None:
            self.d2t = d2t

    def new_cache(self, first):
        return DraftCache(0, first)

    def start(self, cache, anchor, seed=None, pseudo=None, length=None):
        return tiny.ScriptedState([0] * len(anchor), torch.zeros(len(anchor), K, 1))

    def step(self, cache, state, prev):
        sure = None if self.confidence is None else self.confidence[: len(prev), state.k]
        return (
            self.logits[state.k].expand(len(prev), -1),
            sure,
            tiny.ScriptedState(state.plans, state.pseudo, state.k + 1),
        )

    def target_ids(self, ids=None):
        ids = torch.arange(self.config.draft_vocab_size) if ids is None else ids
        return ids + self.d2t[ids] if hasattr(self, "d2t") else ids


def propose(drafter, rows=1, processors=(), seed=None, room=9, stop_ids=(), temperatures=None, **knobs):
    drafter.config.confidence_temperatures = temperatures
    lengths = [3] * rows
    ids = torch.zeros(rows, 20, dtype=torch.long)
    ids[:, :3] = torch.tensor([5, 6, 7])
    scorer = Scorer(LogitsProcessorList(processors), list(ids[:, :3]), list(ids[:, :3]))
    noise = None if seed is None else Noise(seed, list(range(rows)), [0] * rows)
    room = [room] * rows if isinstance(room, int) else room
    places = list(range(rows))
    sampling = Sampling(places, places, scorer, noise, frozenset(stop_ids))
    context = Context(places, ids[:, 2], ids, lengths, room, [sampling])
    proposer = Proposer(drafter, SpeculationConfig(**knobs), torch.zeros(rows, dtype=torch.long))
    return proposer.propose(context), ids


def logits(seed=0, dtype=torch.float32, vocab=V):
    return torch.randn(K, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_q_is_the_very_law_the_drafts_were_drawn_from(dtype, monkeypatch):
    """Drawn in one precision and judged in another, samples are biased."""
    drawn, sample = [], Noise.sample_mass

    def spy(self, mass, rows, i, domain):
        assert domain == "draft"
        drawn.append(mass)
        return sample(self, mass, rows, i, domain)

    monkeypatch.setattr(Noise, "sample_mass", spy)
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]
    draft, _ = propose(Stub(logits(dtype=dtype)), 3, processors, seed=1)
    assert draft.q.dtype == torch.float32
    assert draft.q.equal(torch.stack(drawn, 1))
    assert ((draft.q > 0).sum(-1) == 5).all(), "the user's warpers shape q"
    assert (draft.q.gather(-1, draft.tokens[..., None]) > 0).all()
    torch.testing.assert_close(draft.q.sum(-1), torch.ones(3, K))


def test_log_q_is_unwarped_and_at_temperature_one():
    draft, _ = propose(Stub(logits()), 2, [TemperatureLogitsWarper(0.1), TopKLogitsWarper(2)], seed=1)
    expected = logits().log_softmax(-1).expand(2, K, V).gather(-1, draft.tokens[..., None])[..., 0]
    torch.testing.assert_close(draft.log_q, expected)


def test_greedy_and_matched_drafts_have_no_law():
    greedy, _ = propose(Stub(logits()))
    assert greedy.q is None and greedy.tokens[0].tolist() == logits().argmax(-1).tolist()
    matched, _ = propose(Stub(logits()), seed=3, verification="match")
    assert matched.q is None
    shared = [int(Noise(3, [0], [0]).sample(logits()[k][None], [0], k, "target")) for k in range(K)]
    assert matched.tokens[0].tolist() == shared, "drawn with the target's own noise"


def test_drafts_leave_the_committed_tokens_alone():
    draft, ids = propose(Stub(logits()), 2)
    assert draft.tokens.shape == (2, K) and ids[:, 3:].sum() == 0


def test_processors_of_the_prefix_see_the_drafts_before():
    same = torch.zeros(K, V)
    same[:, 8], same[:, 9], same[:, 10] = 3.0, 2.0, 1.0
    draft, _ = propose(Stub(same), processors=[RepetitionPenaltyLogitsProcessor(1000.0)])
    assert draft.tokens[0, :3].tolist() == [8, 9, 10]


# ---------------------------------------------------------------------- confidence


def test_confidence_logits_are_calibrated_by_place():
    raw = torch.tensor([[2.0, 1.0, -1.0, 3.0]])
    draft, _ = propose(Stub(logits(), raw), temperatures=[2.0, 0.5])
    torch.testing.assert_close(draft.confidence, raw / torch.tensor([2.0, 0.5, 0.5, 0.5]))
    draft, _ = propose(Stub(logits(), raw))
    torch.testing.assert_close(draft.confidence, raw)


def test_a_threshold_keeps_what_lies_before_the_first_doubt():
    sure = torch.tensor([[3.0, 3.0, -3.0, 3.0], [-3.0, 3.0, 3.0, 3.0], [3.0] * 4])
    draft, _ = propose(Stub(logits(), sure), 3, confidence_threshold=0.5)
    assert draft.lengths == [2, 0, 4]
    draft, _ = propose(Stub(logits(), sure), 3)
    assert draft.lengths == [4, 4, 4]


# ---------------------------------------------------------------------- where drafts end


def test_a_drafted_stop_token_is_the_last():
    greedy = logits().argmax(-1).tolist()
    for token in greedy:
        draft, _ = propose(Stub(logits()), stop_ids=[token])
        assert draft.lengths == [greedy.index(token) + 1]
        assert draft.tokens[0, : greedy.index(token) + 1].tolist() == greedy[: greedy.index(token) + 1]


def test_a_stop_token_behind_a_doubt_does_not_count():
    greedy = logits().argmax(-1).tolist()
    sure = torch.tensor([[3.0, -3.0, 3.0, 3.0]])
    draft, _ = propose(Stub(logits(), sure), stop_ids=[greedy[2]], confidence_threshold=0.5)
    assert draft.lengths == [1]


@pytest.mark.parametrize("room", [0, 1, 3, 9])
def test_no_more_is_drafted_than_there_is_room_for(room):
    draft, _ = propose(Stub(logits()), room=room)
    assert draft.lengths == [min(room, K)]
    draft, ids = propose(Stub(logits()), 2, room=[room, 9])
    assert draft.lengths == [min(room, K), K]


@pytest.mark.parametrize(("wanted", "got"), [(None, K), (0, 0), (2, 2), (K, K), (99, K)])
def test_the_number_of_drafts_is_what_was_asked_for_up_to_the_block(wanted, got):
    draft, _ = propose(Stub(logits()), num_draft_tokens=wanted)
    assert draft.lengths == [got]


# ---------------------------------------------------------------------- reduced vocabularies

D2T = torch.tensor([1, 2, 2, 5, 7])  # draft ids 0..4 are target ids 1, 3, 4, 8, 11


def test_drafts_of_a_reduced_vocabulary_are_target_ids_and_q_is_zero_elsewhere():
    small = logits(vocab=5)
    greedy, _ = propose(Stub(small, d2t=D2T))
    ids = torch.tensor([1, 3, 4, 8, 11])
    assert greedy.tokens[0].tolist() == ids[small.argmax(-1)].tolist()
    draft, _ = propose(Stub(small, d2t=D2T), 3, seed=1)
    assert draft.q.shape == (3, K, V)
    torch.testing.assert_close(draft.q[..., ids], small.softmax(-1).expand(3, K, 5))
    assert draft.q.sum(-1).allclose(torch.ones(3, K))
    expected = small.log_softmax(-1).expand(3, K, 5)
    index = torch.searchsorted(ids, draft.tokens)
    torch.testing.assert_close(draft.log_q, expected.gather(-1, index[..., None])[..., 0])


def test_a_constraint_outside_the_reduced_vocabulary_leaves_the_drafter_its_own_law():
    class Only(TopKLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores.masked_fill(torch.arange(V) != 2, -torch.inf)

    Only.__module__ = TopKLogitsWarper.__module__  # a library processor: custom ones aren't asked when drafting
    small = logits(vocab=5)
    draft, _ = propose(Stub(small, d2t=D2T), 2, [Only(1)], seed=1)
    torch.testing.assert_close(draft.q[..., [1, 3, 4, 8, 11]], small.softmax(-1).expand(2, K, 5))
