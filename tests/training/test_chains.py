"""EAGLE-3's training-time test: against chains drafted one by one, packed, chunked, over micro-batches and
processes."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import make_eagle3, make_target
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))  # the second process finds it the same way
from tiny_training import make_trainer, recursive_and_domino, rows, weights

from hf_dspark.modeling import Eagle3Drafter
from hf_dspark.training import ChatDataset, DecodeCheck, new_drafter, new_eagle3
from hf_dspark.training.anchors import Step
from hf_dspark.training.targets import FrozenTarget

CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))
ROOT = Path(__file__).parents[2]
K = 3


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def drafter(target):
    return make_eagle3(target, chain_length=K, draft_vocab_size=40, num_hidden_layers=2)


def draw(rows, length, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 60, (rows, length), generator=g)
    return ids, torch.randn(rows, length, 64, generator=g, dtype=torch.float64)


def decoded_logits(drafter, features, ids, anchor, count, stages=1):
    """[count, Vd]: the recursion of decoding from `anchor` of one document [T], each draft being the true token.

    With several stages, every one of `count` / `stages` drafts, begun as decoding begins it.
    """
    cache, out, pseudo = drafter.new_cache(torch.tensor([0])), [], None
    seed = drafter.extend(
        cache, features[None, :anchor], ids[None, 1 : anchor + 1], torch.ones(1, anchor, dtype=torch.bool)
    )
    for s in range(stages):
        at = anchor + s * count // stages
        state = drafter.start(cache, ids[at, None], seed if s == 0 else None, pseudo)
        for k in range(count // stages):
            logits, _, state = drafter.step(cache, state, ids[at + k, None])
            out.append(logits[0])
        pseudo = state.pseudo
    return torch.stack(out)


@torch.no_grad()
def test_training_and_decoding_give_the_same_logits_in_every_stage(drafter):
    ids, features = draw(1, 16)
    anchors = torch.tensor([[1, 4, 7]])
    out = drafter(features, ids, anchors=anchors, stages=3)
    assert len(out.hidden) == 2 and out.first is None, "stages in between have no heads"
    for n, a in enumerate(anchors[0].tolist()):
        slow = decoded_logits(drafter, features[0], ids[0], a, 3 * K, stages=3)
        for found, expected in zip(out.hidden, (slow[:K], slow[-K:]), strict=True):
            torch.testing.assert_close(drafter.block_logits(found, None)[1][0, n], expected, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_chains_at_some_slots_are_those_at_all_slots(drafter):
    ids, features = draw(2, 9)
    slots = torch.tensor([[0, 5, 5], [7, 2, 8]])
    every = drafter.unroll(features, ids, 4)
    for some, all_slots in zip(drafter.unroll(features, ids, 4, slots=slots), every, strict=True):
        torch.testing.assert_close(some, all_slots[torch.arange(2)[:, None], slots], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_token_changes_no_draft_made_before_it_is_read(target, drafter, stages):
    """Through the target as well, packed: draft k of anchor a reads tokens up to a + k of its own document."""
    positions = torch.tensor([[*range(9), *range(8), 0]])
    document = [0] * 9 + [1] * 8
    frozen, (ids, _) = FrozenTarget(target, [0, 1]), draw(1, 18)
    anchors = torch.tensor([[1, 2, 4, 6, 10, 11, 13]])

    def states(ids):
        features = frozen(ids, ids, positions, packed=True).features
        with torch.no_grad():
            hidden = drafter(features, ids, anchors=anchors, position_ids=positions, stages=stages).hidden
        return torch.stack(hidden)[:, 0]

    before, seen = states(ids), 0
    for p in range(17):
        other = ids.clone()
        other[0, p] = other[0, p] % 59 + 1
        same = (states(other) == before).all(-1)
        for s in range(stages):
            for n, a in enumerate(anchors[0].tolist()):
                for k in range(K):
                    at = a + s * K + k
                    if at < len(document) and document[at] == document[a]:  # others mean nothing and carry no loss
                        reads = p <= at and document[p] == document[a]
                        assert bool(same[s, n, k]) != reads, (p, s, a, k)
                        seen += reads
    assert seen > 100, "the test would see a leak"


def slow_loss(drafter, target, examples, stages):
    """The loss of an optimizer step, word for word: chain by chain, over the whole vocabulary, documents on their
    own."""
    frozen, sums = FrozenTarget(target, [0, 1]), {s: [0.0, 0.0] for s in {0, stages - 1}}
    for example in examples:
        ids, labels = torch.tensor(example["input_ids"]), torch.tensor(example["labels"])
        features = frozen(ids[None], labels[None], torch.arange(len(ids))[None], False).features[0]
        p = target(ids[None]).logits[0].softmax(-1).detach()[:, drafter.target_ids()]
        for a in range(1, len(ids) - 1):
            if labels[a + 1] == -100:
                continue
            log_q = decoded_logits(drafter, features, ids, a, min(stages * K, len(ids) - 1 - a)).log_softmax(-1)
            for s in sums:
                for k in range(K):
                    at = a + s * K + k
                    if at + 1 < len(ids):
                        kl = (p[at] * (p[at].log() - log_q[at - a])).sum()
                        sums[s] = [sums[s][0] + 0.8**k * kl, sums[s][1] + 0.8**k]
    return sum(top / bottom for top, bottom in sums.values()) / len(sums)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_loss_of_a_step_and_its_gradient_equal_a_slow_twin(tmp_path, target, pack, stages):
    drafter = make_eagle3(target, chain_length=K, draft_vocab_size=40)
    data = ChatDataset([{"input_ids": r["input_ids"], "prompt_len": n} for r, n in zip(rows(3), (1, 3, 4))])
    trainer = make_trainer(tmp_path, drafter, target, data, num_anchors=100, pack=pack, max_length=30)
    batch = trainer.data_collator([data[i] for i in range(3)])
    fast = trainer.compute_loss(drafter.train(), {**batch, "step": Step(stages)})
    parameters = [drafter.fc.weight, drafter.layers[0].self_attn.k_proj.weight, drafter.norm.weight]
    directions = [torch.randn(p.shape, generator=torch.Generator().manual_seed(6), dtype=p.dtype) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(fast, parameters), directions, strict=True))
    with torch.no_grad():
        slow, size = [], 1e-3  # norms compute in float32, so smaller differences would be noise
        for move in (0, size, -2 * size):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=move)
            slow.append(slow_loss(drafter, target, data.examples, stages))
    torch.testing.assert_close(fast.detach(), slow[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(slope, (slow[1] - slow[2]) / (2 * size), rtol=5e-3, atol=1e-5)


def test_acceptance_and_tau_are_those_of_a_slow_loop(tmp_path, target):
    drafter = make_eagle3(target, chain_length=K, draft_vocab_size=40)
    data = ChatDataset(rows(2))
    trainer = make_trainer(tmp_path, drafter, target, data, num_anchors=100, loop_exposure=0)
    trainer.eval_dataset = data
    found, ids = trainer.evaluate(), drafter.target_ids()
    rates, taus, greedy_taus = [[] for _ in range(K)], [], []
    for example in data.examples:
        tokens = torch.tensor(example["input_ids"])
        features = FrozenTarget(target, [0, 1])(
            tokens[None], tokens[None], torch.arange(len(tokens))[None], False
        ).features[0]
        p = target(tokens[None]).logits[0].softmax(-1).detach()
        for a in range(2, len(tokens) - 1):
            tau = greedy = rate = hit = 1.0
            count = min(K, len(tokens) - 1 - a)
            for k, logits in enumerate(decoded_logits(drafter, features, tokens, a, count).detach()):
                accept = float(torch.minimum(logits.softmax(-1), p[a + k, ids]).sum())
                rates[k].append(accept)
                rate, hit = rate * accept, hit * float(ids[logits.argmax()] == p[a + k].argmax())
                tau, greedy = tau + rate, greedy + hit
            taus.append(tau)
            greedy_taus.append(greedy)
    mean = lambda x: pytest.approx(sum(x) / len(x), abs=1e-5)  # noqa: E731
    assert found["eval_tau"] == mean(taus) and found["eval_greedy_tau"] == mean(greedy_taus)
    assert [found[f"eval_accept_rate@{k + 1}"] for k in range(K)] == [mean(r) for r in rates]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, target):
    return trained(tmp_path_factory.mktemp("straight"), target)


def trained(folder, target, **changes):
    trainer = make_trainer(folder, recursive_and_domino(target), target, **changes)
    trainer.train()
    return weights(trainer), losses(trainer)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "changes",
    [
        dict(per_device_train_batch_size=2, gradient_accumulation_steps=2),
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=4),
        dict(pack=True, max_length=30),
        {"loss_chunk": 4, CHECKPOINTING: True},
    ],
    ids=["2 x 2", "1 x 4", "packed", "chunked and checkpointed"],
)
def test_how_a_step_is_cut_up_changes_nothing(tmp_path, target, straight, changes):
    found, logged = trained(tmp_path, target, **changes)
    assert logged == pytest.approx(straight[1], abs=1e-6)
    torch.testing.assert_close(found, straight[0], rtol=0, atol=1e-6)


def test_two_processes_equal_one(tmp_path, straight):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    common = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = str(Path(__file__).parent / "tiny_training.py")
    command = [sys.executable, script, str(tmp_path), str(tmp_path / "out.pt"), "recursive"]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(i), "LOCAL_RANK": str(i), "OMP_NUM_THREADS": "1"})
        for i in range(2)
    ]
    assert [p.wait(timeout=300) for p in started] == [0, 0]
    found, logged = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(found, straight[0], rtol=0, atol=1e-6)
    assert logged == pytest.approx(straight[1], abs=1e-6)


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path, target):
    def run(folder, resume=None):
        trainer = make_trainer(folder, recursive_and_domino(target), target, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again)) and losses(whole)[2:] == losses(again)[-2:]
    loaded = Eagle3Drafter.from_pretrained(tmp_path / "whole" / "checkpoint-4" / "eagle3", dtype=torch.float64)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in whole.named["eagle3"].state_dict().items())


def test_gradients_run_through_the_stages_unless_detached(target):
    """Backwards from the very last step: which steps' outputs it reaches, and whether it reaches the features as
    context."""
    (ids, features), slots = draw(1, 14), torch.tensor([[1, 3]])
    features.requires_grad_()
    drafter, reached, gradients = make_eagle3(target, chain_length=K).train(), {}, {}
    for detach in (False, True):
        steps = drafter.unroll(features, ids.roll(-1, 1), 3 * K, slots=slots, detach_every=K if detach else None)
        found = torch.autograd.grad(steps[-1].pow(2).sum(), [*steps, features], allow_unused=True)
        reached[detach] = [g is not None and bool(g.abs().sum() > 0) for g in found]
        hidden = drafter(features, ids, anchors=slots + 1, stages=3, detach_chain=detach).hidden[1]
        (gradients[detach],) = torch.autograd.grad(hidden[:, :, -1].pow(2).sum(), features)
        torch.testing.assert_close(gradients[detach], found[-1], atol=1e-9, rtol=1e-5)
    assert reached[False] == [True] * (3 * K + 1)
    assert reached[True] == [False] * 2 * K + [True] * (K + 1)
    assert not torch.allclose(gradients[False], gradients[True])


def test_the_loss_of_forward_is_the_weighted_mean_of_a_slow_loop(drafter):
    ids, features = draw(2, 9, seed=3)
    labels = ids.masked_fill(torch.rand(2, 9, generator=torch.Generator().manual_seed(4)) < 0.3, -100)
    top, bottom, drafted = 0.0, 0.0, drafter.target_ids().tolist()
    with torch.no_grad():
        for r in range(2):
            for a in range(1, 8):
                for k in range(K):
                    if a + 1 + k > 8 or labels[r, a + 1 + k] == -100:
                        break
                    if int(labels[r, a + 1 + k]) in drafted:
                        log_q = decoded_logits(drafter, features[r], ids[r], a, k + 1)[-1].log_softmax(-1)
                        top -= 0.8**k * log_q[drafted.index(int(labels[r, a + 1 + k]))]
                        bottom += 0.8**k
        torch.testing.assert_close(drafter(features, ids, labels).loss, top / bottom, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="neither labels nor anchors"):
        drafter(features, ids)


def test_the_stock_trainer_trains_on_features_alone(tmp_path, target):
    ids, features = draw(8, 9)
    data = [{"features": f, "input_ids": i, "labels": i} for f, i in zip(features, ids)]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=10, learning_rate=1e-2, logging_steps=5,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(make_eagle3(target, chain_length=K), arguments, train_dataset=data)
    trainer.train()
    first, last = losses(trainer)
    assert last < first


def test_seconds_of_training_raise_tau_teacher_forced_and_in_the_real_loop(tmp_path):
    """The target is nearly a lookup table; an EAGLE-3, a Domino and a DSpark drafter learn it side by side."""
    target = make_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        target.lm_head.weight.mul_(4)
    prompts = torch.stack([torch.arange(1, 33), torch.full((32,), 5), torch.arange(1, 33)], 1)
    ids = target.generate(prompts, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompts))
    data = ChatDataset([{"input_ids": row, "prompt_len": 3} for row in ids.tolist()])
    domino = dict(correction_head="domino", gru_hidden_size=16, correction_size=16, pure_draft_prefix_len=1)
    group = {
        "eagle3": new_eagle3(target, chain_length=3),
        "domino": new_drafter(target, 60, block_size=3, **domino),
        "dspark": new_drafter(target, 60, block_size=3, correction_head="markov", markov_rank=16),
    }
    trainer = make_trainer(
        tmp_path, group, target, data, max_steps=90, num_anchors=8, loop_exposure=0, max_grad_norm=0.0, ce_weight=1.0,
        distill_weight=0.0, logging_steps=90,
    )  # fmt: skip
    trainer.eval_dataset = data
    trainer.decode_check = DecodeCheck(target, [[t, 5, t] for t in (3, 13, 29)], 12)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for name in group:
        assert after[f"eval_{name}_tau"] > before[f"eval_{name}_tau"] + 0.3, name
        assert after[f"eval_{name}_decode_tau"] > before[f"eval_{name}_decode_tau"] + 0.3, name
        assert after[f"eval_{name}_accept_rate@1"] > before[f"eval_{name}_accept_rate@1"] + 0.2, name


def test_eagle3_is_trained_on_the_targets_distribution_whatever_the_blocks_want(tmp_path, target):
    arguments = make_trainer(tmp_path, target=target, ce_weight=1.0, distill_weight=0.0, step_decay=0.5).args
    objective = arguments.objective(make_eagle3(target))
    assert (objective.ce, objective.distill, objective.tv_share(1.0)) == (0.0, 1.0, 0.0)
    assert math.exp(-1 / objective.decay) == pytest.approx(0.5)


def test_a_document_without_a_token_before_its_anchor_gives_that_anchor_no_chain(drafter):
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    anchors = torch.tensor([[0, 1, 3, 4, -1]])
    assert drafter.usable_anchors(anchors, positions).tolist() == [[-1, 1, -1, 4, -1]]
