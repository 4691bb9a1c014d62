"""Recorded runs of the public reference implementations, reproduced through AutoDrafter and `generate`.

Compared round by round: drafts, logits, confidences, how many were proposed and accepted; and the text. A round that
the budget cuts short is compared as far as it goes, as the references run over their budget.
"""

from dataclasses import dataclass

import golden
import pytest
import torch
from golden import load_fixture
from tiny import padded

from hf_dspark import SpeculationConfig
from hf_dspark.drafting.proposer import Proposer


@dataclass
class Seen:
    """One row's share of a round."""

    anchor: int
    drafts: list[int]
    confidence: list[float] | None
    log_q: list[float]
    logits: torch.Tensor
    room: int


@pytest.fixture
def spy(monkeypatch):
    """Records every round, by output row."""
    rounds: dict[int, list[Seen]] = {}
    original = Proposer.propose

    def propose(self, context):
        anchors = [int(context.ids[i, n - 1]) for i, n in enumerate(context.lengths)]
        room, logits, step = list(context.room), [], type(self.drafter).step

        def recording(cache, state, prev):
            out = step(self.drafter, cache, state, prev)
            logits.append(out[0])
            return out

        with monkeypatch.context() as patch:
            patch.setitem(self.drafter.__dict__, "step", recording)
            draft = original(self, context)
        for i, row in enumerate(context.rows):
            n, conf = draft.lengths[i], draft.confidence
            rounds.setdefault(row, []).append(
                Seen(
                    anchors[i],
                    draft.tokens[i, :n].tolist(),
                    None if conf is None else conf[i, : n + 1].sigmoid().tolist(),
                    draft.log_q[i, :n].tolist(),
                    torch.stack([x[i] for x in logits if len(x) == len(context.rows)][:n]) if n else torch.empty(0),
                    room[i],
                )
            )
        return draft

    monkeypatch.setattr(Proposer, "propose", propose)
    return rounds


def close(a, b):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), atol=1e-4, rtol=1e-4)


def run(target, drafter, prompts, tokens, **knobs):
    """New tokens of each row, batched where there are several."""
    batch = padded([torch.tensor(p) for p in prompts])
    out = target.generate(
        **batch, assistant_model=drafter, max_new_tokens=tokens, do_sample=False, eos_token_id=None,
        speculation=SpeculationConfig(**knobs),
    )  # fmt: skip
    return out[:, batch["input_ids"].shape[1] :].tolist()


def check_lengths(ours: list[int], theirs: list[int]):
    assert ours[:-1] == theirs[: len(ours) - 1]
    assert ours[-1] <= theirs[len(ours) - 1]


def together(cases, batched):
    """The cases one by one, or all in one ragged batch."""
    return [cases] if batched else [[case] for case in cases]


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("name", [*golden.DEEPSPEC, "specforge-dspark-vanilla"])
def test_deepspec_rounds(name, threshold, batched, spy):
    target, drafter, expected, tensors = load_fixture(name)
    cases = [c for c in expected["cases"] if c.get("confidence_threshold", 0.0) == threshold]
    if not cases:
        assert not drafter.config.confidence_head
        return
    drafts = drafter.config.max_block
    for start, group in enumerate(together(cases, batched)):
        spy.clear()
        new = run(target, drafter, [c["prompt"] for c in group], 40, confidence_threshold=threshold)
        for row, case in enumerate(group):
            assert case["prompt"] + new[row] == case["output_ids"]
            check_lengths(drafter.last_speculation.acceptance_lengths[row], case["acceptance_lengths"])
            for k, (seen, reference) in enumerate(zip(spy[row], case["rounds"])):
                assert seen.anchor == reference["anchor"]
                assert len(seen.drafts) == min(reference.get("proposed", drafts), seen.room)
                assert seen.drafts == reference["draft"][: len(seen.drafts)]
                if seen.confidence is not None:
                    close(seen.confidence, reference["confidence"][: len(seen.confidence)])
                if k < 3 and threshold == 0.0:
                    close(seen.logits, tensors[f"p{start + row}.r{k}.logits"][: len(seen.drafts)])


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("name", ["zlab-dflash-b8", "specforge-domino-shift", "deepspec-eagle3"])
def test_rounds_recorded_as_verified_blocks(name, batched, spy):
    target, drafter, expected, _ = load_fixture(name)
    proposed = len(expected["cases"][0]["verify_blocks"][0]) - 1  # the shifted Domino's library proposes one less
    for group in together(expected["cases"], batched):
        spy.clear()
        new = run(target, drafter, [c["prompt"] for c in group], 40, num_draft_tokens=proposed)
        for row, case in enumerate(group):
            assert case["prompt"] + new[row] == case["output_ids"]
            check_lengths(drafter.last_speculation.acceptance_lengths[row], case["acceptance_lengths_upper"])
            for seen, block in zip(spy[row], case["verify_blocks"]):
                assert [seen.anchor, *seen.drafts] == block[: 1 + len(seen.drafts)]
                assert len(seen.drafts) == min(proposed, seen.room)


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "ragged batch"])
def test_safeailab_chains(batched, spy):
    target, drafter, expected, tensors = load_fixture("safeailab-eagle3-llama")
    proposed = expected["chain"]["num_draft_tokens"]
    cases = [c for c in expected["cases"] if c["mode"] == "chain"]
    for start, group in enumerate(together(cases, batched)):
        spy.clear()
        new = run(target, drafter, [c["prompt"] for c in group], 40, num_draft_tokens=proposed)
        for row, case in enumerate(group):
            assert case["prompt"] + new[row] == case["greedy_ids"][: len(case["prompt"]) + 40]
            check_lengths(drafter.last_speculation.acceptance_lengths[row], case["acceptance_lengths"])
            for k, (seen, reference) in enumerate(zip(spy[row], case["rounds"])):
                assert [seen.anchor, *seen.drafts] == reference["tokens"][: 1 + len(seen.drafts)]
                if k < 3:
                    steps = tensors[f"chain.p{start + row}.r{k}.step_logits"][:, 0]
                    first = tensors[f"chain.p{start + row}.r{k}.step0_logits"]
                    close(seen.logits, torch.cat([first, steps])[: len(seen.drafts)])


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("name", golden.SPECULATORS)
def test_speculators_proposals_from_given_anchors(name, batched, spy):
    target, drafter, expected, tensors = load_fixture(name)
    for c, case in enumerate(expected["cases"]):
        tokens, cut = case["tokens"], []
        for a, place in enumerate(case["anchors"]):
            cut.append((a, tokens[:place], tokens[place]))
        for group in together(cut, batched):
            spy.clear()
            batch = padded([torch.tensor(prompt) for _, prompt, _ in group])

            def allowed(row, prefix, group=group, batch=batch):  # the given anchor comes first, then anything
                anchor, width = group[row][2], batch["input_ids"].shape[1]
                return [anchor] if len(prefix) == width else list(range(target.config.vocab_size))

            target.generate(
                **batch, assistant_model=drafter, max_new_tokens=drafter.config.max_block + 2, do_sample=False,
                eos_token_id=None, prefix_allowed_tokens_fn=allowed,
            )  # fmt: skip
            for row, (a, _, anchor) in enumerate(group):
                seen = spy[row][0]
                assert seen.anchor == anchor
                assert seen.drafts == case["greedy_draft"][a]
                accepted = case["greedy_accepted_vs_target_greedy"][a]
                assert drafter.last_speculation.accepted_lengths[row][0] == accepted
                close(seen.logits, tensors[f"c{c}.greedy_logits"][a])
                if drafter.config.confidence_head:
                    close(seen.confidence, tensors[f"c{c}.greedy_confidence_logits"][a].sigmoid())


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("name", golden.LOOPED)
def test_looped_rounds(name, batched, spy):
    target, drafter, expected, tensors = load_fixture(name)
    stages = expected["stages"]
    for start, group in enumerate(together(expected["cases"], batched)):
        spy.clear()
        knobs = dict(loop_gate=-1e9, max_draft_stages=stages)
        new = run(target, drafter, [c["prompt"] for c in group], 40, **knobs)
        for row, case in enumerate(group):
            assert case["prompt"] + new[row] == case["output_ids"]
            check_lengths(drafter.last_speculation.acceptance_lengths[row], case["acceptance_lengths"])
            for k, (seen, reference) in enumerate(zip(spy[row], case["rounds"])):
                drafts, log_probs = sum(reference["stages"], []), sum(reference["log_probs"], [])
                assert seen.anchor == reference["anchor"]
                assert len(seen.drafts) == min(len(drafts), seen.room)
                assert seen.drafts == drafts[: len(seen.drafts)]
                close(seen.log_q, log_probs[: len(seen.drafts)])
                if k < 2:
                    parts = [tensors[f"p{start + row}.r{k}.s{s}.logits"] for s in range(stages)]
                    close(seen.logits, torch.cat(parts)[: len(seen.drafts)])
            full = [
                s for s, seen in zip(drafter.last_speculation.draft_stages[row], spy[row]) if seen.room > len(drafts)
            ]
            assert set(full) == {stages}
