"""The exactness report: nothing to report where texts are equal, the first difference and its logit gap where they
aren't."""

import math

import pytest
import tiny
import torch

from hf_dspark.decoding.selfcheck import SelfCheck
from hf_dspark.evaluation import exactness
from hf_dspark.evaluation.exactness import Exactness, check_exactness


def test_equal_texts_are_exact(llama):
    drafter = tiny.make_drafter(llama.target)
    seen, prompts = [], [p.tolist() for p in llama.prompts]
    report = check_exactness(llama.target, drafter, prompts, max_new_tokens=8, progress=seen.append)
    assert seen == [1, 2, 3, 4]
    assert report.verdict == "exact" and report.divergences == [None] * 4 and report.tokens == 32
    assert report.dtype == "float64"


class Broken:
    """A target whose text with a drafter differs from the `at`-th new token on, or ends there."""

    def __init__(self, target, at, token=None):
        self.target, self.at, self.token = target, at, token
        self.device, self.dtype = target.device, target.dtype

    def __call__(self, **inputs):
        return self.target(**inputs)

    def __getattr__(self, name):
        return getattr(self.target, name)

    def generate(self, ids, assistant_model=None, **options):
        out = self.target.generate(ids, **options)
        if assistant_model is not None:
            n = ids.shape[1] + self.at
            if self.token is None:
                return out[:, :n]
            out[:, n] = self.token
        return out


def test_the_first_difference_comes_with_the_targets_logits_there(llama):
    prompt, text = llama.prompts[0], llama.texts[0]
    wrong = tiny.wrong(llama.new[0][5])
    report = check_exactness(Broken(llama.target, 5, wrong), object(), [prompt.tolist()], max_new_tokens=tiny.NEW)
    (d,) = report.divergences
    with torch.no_grad():
        logits = llama.target(torch.tensor([text[: len(prompt) + 5]])).logits[0, -1]
    assert (d.index, d.plain, d.ours) == (5, llama.new[0][5], wrong)
    assert d.gap == pytest.approx(float(logits.max() - logits[wrong]), rel=1e-5)
    assert report.verdict == "different" and not d.near_tie  # float64 has no near ties to excuse


def test_a_gap_below_the_dtypes_share_of_the_logit_is_a_near_tie(llama, monkeypatch):
    def verdict():
        wrong = tiny.wrong(llama.new[0][5])
        report = check_exactness(
            Broken(llama.target, 5, wrong), object(), [llama.prompts[0].tolist()], max_new_tokens=tiny.NEW
        )
        return report.verdict, report.divergences[0].relative

    _, relative = verdict()
    for factor, expected in ((1.01, "near ties"), (0.99, "different")):
        monkeypatch.setitem(exactness.NEAR_TIE, torch.float64, factor * relative)
        assert verdict() == (expected, relative)
    assert torch.float32 not in exactness.NEAR_TIE  # where rounding is no excuse


def test_a_text_that_ends_early_is_a_difference(llama):
    report = check_exactness(Broken(llama.target, 5), object(), [llama.prompts[0].tolist()], max_new_tokens=tiny.NEW)
    (d,) = report.divergences
    assert (d.index, d.plain, d.ours) == (5, llama.new[0][5], None) and math.isnan(d.gap)
    assert report.verdict == "different"
    assert Exactness([None, None], 9, "float32", SelfCheck(0.0, 0.0, 1.0, 1.0)).verdict == "exact"
