"""Every published format drafts as its own library did: recorded features in, recorded logits and drafts out."""

import golden
import pytest
import torch
from golden import load_fixture, target_features


def draft(drafter, features, tokens, anchors, teacher=None):
    """Draft from each of `anchors` [A]: drafts [A, K], logits [A, K, Vd], confidence logits [A, K] or None.

    `features` [T, m*D] and `tokens` [T] are one sequence; `teacher` [A, K] replaces the drafted tokens as previous
    ones.
    """
    A, T = len(anchors), int(anchors.max())
    cache = drafter.new_cache(torch.zeros(A, dtype=torch.long))
    valid = torch.arange(T) < anchors[:, None]
    after = torch.cat([tokens[1:], tokens[-1:]])[:T]
    with torch.no_grad():
        seed = drafter.extend(cache, features[:T].expand(A, -1, -1), after.expand(A, -1), valid)
        state, previous, out = drafter.start(cache, tokens[anchors], seed), tokens[anchors], []
        for k in range(drafter.config.max_block):
            previous = previous if teacher is None else teacher[:, k]
            logits, confidence, state = drafter.step(cache, state, previous)
            previous = drafter.target_ids(logits.argmax(-1))
            out.append((previous, logits, confidence))
    drafts, logits, confidences = zip(*out, strict=True)
    return torch.stack(drafts, 1), torch.stack(logits, 1), None if None in confidences else torch.stack(confidences, 1)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def real_tokens(tokens, anchors, count):
    """[A, count] tokens at p, p + 1, ...: the one before each draft, whichever way the block is laid out."""
    index = (anchors[:, None] + torch.arange(count)).clamp(max=len(tokens) - 1)
    return tokens[index]


@pytest.mark.parametrize("name", golden.SPECULATORS)
def test_speculators_blocks_equal_the_library_teacher_forced_and_greedy(name):
    _, drafter, expected, tensors = load_fixture(name)
    first = 0 if drafter.config.sample_from_anchor else 1
    for n, case in enumerate(expected["cases"]):
        record = {key: tensors.get(f"c{n}.{key}") for key in ("input_ids", "hidden_states", "anchors", "logits")}
        tokens, features, anchors, logits = record.values()
        teacher = real_tokens(tokens, anchors, drafter.config.max_block)
        _, forced, confidence = draft(drafter, features, tokens, anchors, teacher)
        close(forced, logits[:, first:])
        drafts, greedy, greedy_confidence = draft(drafter, features, tokens, anchors)
        assert drafts.tolist() == case["greedy_draft"]
        close(greedy, tensors[f"c{n}.greedy_logits"])
        if drafter.config.confidence_head:
            close(confidence, tensors[f"c{n}.confidence_logits"][:, first:])
            close(greedy_confidence, tensors[f"c{n}.greedy_confidence_logits"])


def test_specforge_dspark_equals_its_training_forward():
    _, drafter, expected, tensors = load_fixture("specforge-dspark-vanilla")
    for n, case in enumerate(expected["teacher_forced"]):
        tokens, features, anchors = (tensors[f"c{n}.{key}"] for key in ("input_ids", "hidden_states", "anchors"))
        labels = tensors[f"c{n}.labels"]
        teacher = torch.cat([tokens[anchors][:, None], labels[:, :-1]], 1)
        _, forced, confidence = draft(drafter, features, tokens, anchors, teacher)
        close(forced, tensors[f"c{n}.logits"])
        close(confidence, tensors[f"c{n}.confidence_logits"])
        drafts, greedy, _ = draft(drafter, features, tokens, anchors)
        assert drafts.tolist() == case["greedy_draft"]
        close(greedy, tensors[f"c{n}.greedy_logits"])


def anchors_of(case, lengths):
    """Position of each round's anchor: the first lies behind the prompt."""
    return torch.tensor([len(case["prompt"]), *lengths[:-1]]).cumsum(0)


@pytest.mark.parametrize("name", [*golden.DEEPSPEC, "specforge-dspark-vanilla"])
def test_deepspec_rounds_draft_the_recorded_tokens_logits_and_confidences(name):
    target, drafter, expected, tensors = load_fixture(name)
    cases = [case for case in expected["cases"] if not case.get("confidence_threshold")]
    for p, case in enumerate(cases):
        tokens, anchors = torch.tensor(case["output_ids"]), anchors_of(case, case["acceptance_lengths"])
        features = target_features(target, tokens, drafter.config.target_layer_ids)[0]
        drafts, logits, confidence = draft(drafter, features, tokens, anchors)
        assert drafts.tolist() == [r["draft"] for r in case["rounds"]]
        close(logits[:3], torch.stack([tensors[f"p{p}.r{k}.logits"] for k in range(3)]))
        if drafter.config.confidence_head:
            close(confidence.sigmoid(), torch.tensor([r["confidence"] for r in case["rounds"]]))


@pytest.mark.parametrize("name", ["zlab-dflash-b8", "specforge-domino-shift", "deepspec-eagle3"])
def test_formats_without_recorded_tensors_draft_the_recorded_blocks(name):
    target, drafter, expected, _ = load_fixture(name)
    for case in expected["cases"]:
        tokens, anchors = torch.tensor(case["output_ids"]), anchors_of(case, case["acceptance_lengths_upper"])
        anchors = anchors[anchors < len(tokens)]
        features = target_features(target, tokens, drafter.config.target_layer_ids)[0]
        drafts, _, _ = draft(drafter, features, tokens, anchors)
        # The shifted Domino's library proposes one draft less than its block gives.
        blocks = torch.tensor(case["verify_blocks"])[: len(anchors)]
        assert torch.equal(blocks[:, 0], tokens[anchors])
        assert torch.equal(drafts[:, : blocks.shape[1] - 1], blocks[:, 1:])


@pytest.mark.parametrize("name", ["speculators-eagle3-llama", "speculators-eagle3-v31"])
def test_speculators_eagle3_equals_its_training_unroll(name):
    _, drafter, expected, tensors = load_fixture(name)
    for n, case in enumerate(expected["cases"]):
        features, tokens, logits = (tensors[f"c{n}.{key}"] for key in ("hidden_states", "input_ids", "logits"))
        with torch.no_grad():
            steps = drafter.unroll(features[None], tokens[None], len(logits))
        for outputs, recorded, rows in zip(steps, logits, case["valid_rows"], strict=True):
            close(drafter.logits(outputs[0, :rows]), recorded[:rows])


def test_safeailab_eagle3_equals_its_forward_and_drafts_its_chains():
    target, drafter, expected, tensors = load_fixture("safeailab-eagle3-llama")
    features, tokens = tensors["tf.features"], tensors["tf.input_ids"]
    with torch.no_grad():
        (outputs,) = drafter.unroll(features[None, :-1], tokens[None, 1:], 1)
    close(outputs[0], tensors["tf.hidden"])
    close(drafter.logits(outputs[0]), tensors["tf.logits"])
    drafter.config.chain_length = expected["chain"]["num_draft_tokens"]
    chains = [case for case in expected["cases"] if case["mode"] == "chain"]
    for case in chains:
        tokens = torch.tensor(case["output_ids"])
        anchors = torch.tensor([r["context_len"] for r in case["rounds"]])
        drafts, _, _ = draft(drafter, target_features(target, tokens, [1, 3, 4])[0], tokens, anchors)
        assert drafts.tolist() == [r["tokens"][1:] for r in case["rounds"]]
