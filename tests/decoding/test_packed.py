"""Rows of different widths as one flat sequence give what the padded rows and each row alone give."""

import pytest
import tiny
import torch

from hf_dspark import SpeculationConfig
from hf_dspark.decoding import packed
from hf_dspark.decoding.packed import Layout
from hf_dspark.decoding.target import FeatureTap, Target

WIDTHS = [1, 4, 1, 6]


def test_a_layout_goes_to_rows_and_back():
    layout = Layout([1, 3, 2])
    flat = torch.arange(12).reshape(1, 6, 2)
    rows = layout.rows(flat)
    assert rows[:, :, 0].tolist() == [[0, 0, 0], [2, 4, 6], [8, 10, 10]]
    assert layout.flat(rows).equal(flat)
    heads = layout.heads(flat[:, None].expand(1, 5, 6, 2))
    assert heads.shape == (3, 5, 3, 2) and heads[:, 4].equal(rows)


def prefilled(model, prompts):
    cache = model.new_cache(len(prompts))
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([p, p.new_zeros(width - len(p))]) for p in prompts])
    model.forward(ids, cache, list(map(len, prompts)))
    cache.advance(torch.tensor(list(map(len, prompts))))
    return cache


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 1, 1, 1]], ids=["ragged", "one length"])
def test_packed_is_padded_is_each_row_alone(case, rows):
    """Twice over the same cache: the second step reads what the first wrote."""
    prompts = [case.prompts[r] for r in rows]
    ids = torch.randint(3, tiny.V - 1, (4, max(WIDTHS)), generator=torch.Generator().manual_seed(1))
    packed._AGREES.clear()
    with FeatureTap(case.target, [-1, 0, 1]) as tap:
        model = Target(case.target, tap)
        results = []
        for way in ("padded", "packed", "alone"):
            caches = [prefilled(model, [p]) for p in prompts] if way == "alone" else [prefilled(model, prompts)]
            steps = []
            for _ in range(2):
                parts = []
                for i, cache in enumerate(caches):
                    mine, fed = (WIDTHS[i : i + 1], ids[i : i + 1, : WIDTHS[i]]) if way == "alone" else (WIDTHS, ids)
                    ends = [n + w for n, w in zip(cache.lengths.tolist(), mine)]
                    if way == "packed":
                        packed._AGREES.setdefault(case.target, {})[case.target.config._attn_implementation] = True
                    out = model.forward(fed, cache, ends, widths=mine if way == "packed" else None)
                    assert model.fed == (sum(WIDTHS) if way == "packed" else fed.numel())
                    features = tap.features()
                    parts += [torch.cat([out.logits[r, :w], features[r, :w]], -1) for r, w in enumerate(mine)]
                    cache.advance(torch.tensor(mine))
                steps += parts
            results.append(steps)
    close = 1e-5 if case.target.config._attn_implementation == "eager" else 1e-9  # eager takes the softmax in float32
    for others in results[1:]:
        for expected, got in zip(results[0], others, strict=True):
            torch.testing.assert_close(got, expected, rtol=close, atol=close)
    assert case.target.config._attn_implementation in packed.KERNELS


def test_every_target_is_checked_once_and_found_to_agree(case):
    packed._AGREES.clear()
    with FeatureTap(case.target, []) as tap:
        model = Target(case.target, tap)
        cache = prefilled(model, case.prompts)
        ends = [n + w for n, w in zip(cache.lengths.tolist(), WIDTHS)]
        ids = torch.randint(3, tiny.V - 1, (4, 6))
        assert packed.agrees(case.target) is None
        first = model.forward(ids, cache, ends, widths=WIDTHS).logits
        assert packed.agrees(case.target) is True and model.fed == 24
        second = model.forward(ids, cache, ends, widths=WIDTHS).logits
        assert model.fed == 12
    layout = Layout(WIDTHS)
    torch.testing.assert_close(layout.flat(first), layout.flat(second), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_where_packed_differs_the_padded_path_stays(fresh_target, monkeypatch, fault):
    original = packed.Layout.heads

    def broken(self, states):
        if fault == "raises":
            raise RuntimeError("no such kernel")
        return original(self, states).roll(1, 0)

    monkeypatch.setattr(packed.Layout, "heads", broken)
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
    with FeatureTap(fresh_target, [0]) as tap:
        model = Target(fresh_target, tap)
        cache, ids = prefilled(model, prompts), torch.tensor([[8, 9], [10, 11]])
        expected = model.forward(ids, cache, [4, 4]).logits
        for _ in range(2):
            got = model.forward(ids, cache, [4, 4], widths=[1, 2]).logits
            assert got[0, 0].equal(expected[0, 0]) and got[1].equal(expected[1]) and model.fed == 4
            assert tap.features().shape == (2, 2, tiny.HIDDEN)
    assert packed.agrees(fresh_target) is False and fresh_target.config._attn_implementation == "sdpa"


def test_generation_with_rows_of_all_widths_is_greedy(case):
    packed._AGREES.clear()
    drafter = tiny.good(case.texts, confidence=lambda k: 1.0)
    inputs = case.padded()
    out = case.target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=tiny.NEW, do_sample=False,
        speculation=SpeculationConfig(copy=3),
    )  # fmt: skip
    assert tiny.generated(out, inputs["input_ids"].shape[1], [tiny.NEW] * 4) == case.new
    assert packed.agrees(case.target) is True
