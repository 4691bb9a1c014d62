import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dspark.modeling.packed_blocks import chain_labels, dense_anchors
from hf_dspark.training.anchors import draw_anchors, draw_stages, keyed_generator
from hf_dspark.training.data import BlockCollator, ChatDataset, example_from, render_chat, template_hash

WORDS = "<pad> <user> <assistant> <end> hi how are you fine thanks and bye see later what time is it noon".split()
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# its mark ends with a token: transformers before 5.2x supervises one more where a span ends in mere white space
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <end>"
    "{% endgeneration %} {% else %}{{ m['content'] }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}> {% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %} "
    "<end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
TWO_TURNS = [
    {"role": "user", "content": "hi how are you"},
    {"role": "assistant", "content": "fine thanks"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you later"},
]


def tokenizer(template):
    words = {word: i for i, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", chat_template=template)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_tokens_and_their_end_are_supervised(template):
    ids, mask = render_chat(tokenizer(template), TWO_TURNS)
    text = [WORDS[i] for i in ids]
    assert " ".join(text) == (
        "<user> hi how are you <end> <assistant> fine thanks <end> <user> bye <end> <assistant> see you later <end>"
    )
    assert [w for w, m in zip(text, mask, strict=True) if m] == "fine thanks <end> see you later <end>".split()


def test_turns_a_template_rewrites_afterwards_are_not_supervised():
    ids, mask = render_chat(tokenizer(FORGETFUL), TWO_TURNS)
    assert [WORDS[i] for i, m in zip(ids, mask, strict=True) if m] == "see you later <end>".split()
    with pytest.raises(ValueError, match="no assistant turn"):
        render_chat(tokenizer(FORGETFUL), TWO_TURNS[:1])


def test_supervised_positions_and_labels_of_a_packed_chat_are_as_written_by_hand():
    """Two documents, the first of two turns: each (predicting position, label) pair, first answer tokens included."""
    one_turn = [{"role": "user", "content": "what time is it"}, {"role": "assistant", "content": "noon"}]
    data = ChatDataset([{"messages": TWO_TURNS}, {"messages": one_turn}], tokenizer(PLAIN))
    batch = BlockCollator(num_anchors=99, pack=True, length=40)([data[0], data[1]])
    assert batch["input_ids"].shape == (1, 27)
    written = [
        (6, "fine"), (7, "thanks"), (8, "<end>"),
        (13, "see"), (14, "you"), (15, "later"), (16, "<end>"),
        (24, "noon"), (25, "<end>"),
    ]  # fmt: skip
    anchors = batch["anchors"]
    labels = chain_labels(batch["labels"], batch["position_ids"], anchors, 3)
    found = {
        (a + k, WORDS[x])
        for a, row in zip(anchors[0].tolist(), labels[0], strict=True)
        for k, x in enumerate(row)
        if x >= 0
    }
    assert sorted(found) == written
    assert anchors[0].tolist() == [p for p, _ in written]
    assert dense_anchors(batch["labels"], batch["position_ids"])[0].tolist() == anchors[0].tolist()
    assert batch["position_ids"][0, 18:].tolist() == list(range(9))


def test_stored_ids_are_used_as_they_are():
    row = {"input_ids": [5, 6, 7, 8], "prompt_len": 2, "messages": TWO_TURNS}
    assert example_from(row, tokenizer(PLAIN)) == {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    with pytest.raises(ValueError, match="give no tokens"):
        example_from({"text": "hi"})


def test_hardly_any_supervised_tokens_are_an_error():
    rows = [{"input_ids": [1] * 300, "prompt_len": 298}]
    with pytest.raises(ValueError, match="2 of 300 tokens are supervised"):
        ChatDataset(rows)
    assert ChatDataset([{"input_ids": [1] * 100, "prompt_len": 99}]).supervised == 1


def test_anchors_depend_on_seed_epoch_and_example_alone():
    rows = [{"input_ids": list(range(1, 40)), "prompt_len": 5} for _ in range(4)]
    data, collate = ChatDataset(rows), BlockCollator(num_anchors=6, seed=3)
    together = collate([data[i] for i in range(4)])["anchors"]
    alone = torch.cat([collate([data[i]])["anchors"] for i in range(4)])
    assert torch.equal(together, alone)
    assert len({tuple(a.tolist()) for a in together}) == 4
    assert not torch.equal(collate([data[1, 0]])["anchors"], together[:1])
    assert torch.equal(collate([data[0, 0]])["anchors"], together[:1])
    packed = BlockCollator(num_anchors=6, seed=3, pack=True, length=80)([data[i] for i in range(4)])
    assert packed["anchors"].shape == (2, 12)
    assert torch.equal(packed["anchors"][0, 6:], together[1] + 39)


def test_anchors_are_drawn_without_replacement_where_the_next_token_is_supervised():
    labels = torch.tensor([-100, -100, 5, 6, -100, 7])
    assert draw_anchors(labels, 99, keyed_generator(0)).tolist() == [1, 2, 4]
    drawn = {tuple(draw_anchors(labels, 2, keyed_generator(i)).tolist()) for i in range(50)}
    assert drawn == {(1, 2), (1, 4), (2, 4)}


def test_stages_are_uniform_on_2_to_n_plus_1_and_fixed_by_the_step():
    drawn = [draw_stages(1, step, 3) for step in range(3000)]
    assert drawn == [draw_stages(1, step, 3) for step in range(3000)]
    assert all(abs(drawn.count(s) / 3000 - 1 / 3) < 0.04 for s in (2, 3, 4)) and set(drawn) == {2, 3, 4}
    assert draw_stages(1, 5, 0) == 1


def test_the_draft_vocabulary_holds_the_most_frequent_supervised_ids_in_order():
    data = ChatDataset(
        [{"input_ids": [9, 9, 9, 7, 7, 3, 2], "prompt_len": 3}, {"input_ids": [1, 5, 5, 5], "prompt_len": 1}]
    )
    assert data.draft_vocabulary(3, 12).tolist() == [2, 5, 7]


def test_the_template_hash_tells_templates_apart():
    assert template_hash(tokenizer(PLAIN)) == template_hash(tokenizer(PLAIN)) != template_hash(tokenizer(MARKED))
    assert template_hash(tokenizer(None)) is None
