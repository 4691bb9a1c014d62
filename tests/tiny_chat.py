"""A tokenizer with a chat template for the tiny targets, folders with tiny models, and a drafter that has learnt
something."""

import functools
from pathlib import Path
from typing import NamedTuple

import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dspark import DSparkConfig, DSparkDrafter
from hf_dspark.decoding.target import FeatureTap

TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}w60 {% endif %}"
    "{% for m in messages %}w50 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w51{% endif %}"
)
PROMPTS = ["w3 w4 w5", "w10 w11 w12 w13 w14", "w20 w21", "w30 w31 w32 w33"]
EOS = 2


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words `w3`, `w4`, ... are ids 3, 4, ...; 0 is the pad, 1 begins and 2 ends a text."""
    words = {"<pad>": tiny.PAD, "<bos>": tiny.BOS, "<eos>": EOS, **{f"w{i}": i for i in range(3, tiny.V)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = template
    return fast


def save_world(folder: Path, drafter=None) -> tuple[str, str]:
    """Folders of the target with its tokenizer and of `drafter` (a random one by default), as the commands take
    them."""
    target = tiny.make_target(**tiny.TARGETS["llama"][2]).float()
    drafter = drafter or tiny.make_drafter(target).float()
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


class Trained(NamedTuple):
    target: torch.nn.Module
    drafter: DSparkDrafter
    prompts: list[list[int]]


@functools.cache
def trained(sample_from_anchor: bool = True) -> Trained:
    """A drafter that knows the greedy answers to six prompts by heart, in float32: about 3 drafts of 4 are accepted."""
    target = tiny.make_target(**tiny.TARGETS["llama"][2], num_hidden_layers=4).float()
    redrawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in target.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.15, generator=redrawn)
    prompts = torch.randint(3, tiny.V - 1, (6, 6), generator=redrawn)
    ids = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=30, do_sample=False)
    config = DSparkConfig(
        vocab_size=tiny.V, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, block_size=4 if sample_from_anchor else 5, mask_token_id=tiny.V - 1,
        target_layer_ids=[0, 1], num_target_layers=4, correction_head="none", sample_from_anchor=sample_from_anchor,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        drafter = DSparkDrafter(config).bind(target)
        with FeatureTap(target, config.target_layer_ids) as tap, torch.no_grad():
            target(ids)
            features = tap.features()
        labels, anchors = ids.clone(), torch.arange(5, 31).expand(6, -1)
        labels[:, :6] = -100
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for _ in range(90):
            drafter(features, ids, labels=labels, anchors=anchors).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return Trained(target, drafter.eval(), prompts.tolist())
