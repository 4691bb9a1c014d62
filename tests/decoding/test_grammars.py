"""Processors of grammar libraries keep a parser in step with the text: they work for one row and are refused for
several.

Run where `xgrammar` or `outlines` is installed.
"""

import re

import pytest
import tiny
import torch

from hf_dspark import SpeculationConfig

# outlines compiles its kernel, whose import warns inside torch; eagerly it is as good here.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
EOS = 2
WORDS = [
    "<pad>",
    "<bos>",
    "<eos>",
    *"0123456789",
    *"abcdefghij",
    *"+-*/()",
    *[f"{n}{m}" for n in "01234" for m in "567890"],
]
WORDS += [f"w{i}" for i in range(tiny.V - len(WORDS))]
PATTERN = "[a-j]{2}[0-9]{3,5}(\\+[0-9]{2})?[a-e]"


def xgrammar_processor():
    xgr = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    info = xgr.TokenizerInfo(WORDS, vocab_size=tiny.V, stop_token_ids=[EOS])
    return LogitsProcessor(xgr.GrammarCompiler(info).compile_regex(PATTERN))


def outlines_processor():
    pytest.importorskip("outlines")
    from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor
    from outlines_core import Index, Vocabulary

    tokens = {word: [i] for i, word in enumerate(WORDS) if i > EOS}
    return OutlinesCoreLogitsProcessor(Index(PATTERN, Vocabulary(EOS, tokens)), "torch")


@pytest.fixture(params=[xgrammar_processor, outlines_processor], ids=["xgrammar", "outlines"])
def make(request):
    request.param()  # skips where the library isn't installed
    with torch.compiler.set_stance("force_eager"):
        yield request.param


ARGS = dict(max_new_tokens=tiny.NEW, eos_token_id=EOS, pad_token_id=tiny.PAD)


def written(out):
    return "".join(WORDS[t] for t in out[0, 9:].tolist() if t > EOS)


@pytest.mark.parametrize("row", [0, 3])
def test_one_row_gets_the_text_of_plain_generation(llama, make, row):
    batch = {name: value[row : row + 1] for name, value in llama.padded().items()}
    expected = llama.target.generate(**batch, **ARGS, do_sample=False, logits_processor=[make()])
    assert re.fullmatch(PATTERN, written(expected)) and expected[0, -1] == EOS
    text = llama.prompts[row].tolist() + expected[0, 9:].tolist()
    for drafter in (
        tiny.oracle([text]),
        tiny.good([text]),
        tiny.make_drafter(llama.target),
        tiny.make_eagle3(llama.target),
    ):
        args = dict(**ARGS, do_sample=False, logits_processor=[make()], assistant_model=drafter)
        assert llama.target.generate(**batch, **args).equal(expected)


@pytest.mark.parametrize("verification", ["match", "ratio"])
def test_sampled_texts_obey_the_grammar(llama, make, verification):
    for seed in range(3):
        knobs = SpeculationConfig(verification=verification, seed=seed)
        drafter = tiny.Twin(llama.target, llama.prompts, block=4)
        args = dict(**ARGS, do_sample=True, temperature=2.0, speculation=knobs, assistant_model=drafter)
        out = llama.target.generate(llama.prompts[0][None], logits_processor=[make()], **args)
        assert re.fullmatch(PATTERN, written(out)) or out.shape[1] == 9 + tiny.NEW


def test_several_rows_and_block_verification_are_refused_in_words(llama, make):
    drafter = tiny.good(llama.texts)
    with pytest.raises(ValueError, match="is a logits processor of your own, given for 4 rows.*one row at a time"):
        llama.target.generate(**llama.padded(), **ARGS, logits_processor=[make()], assistant_model=drafter)
    knobs = SpeculationConfig(verification="block")
    args = dict(**ARGS, do_sample=True, speculation=knobs, assistant_model=drafter)
    with pytest.raises(ValueError, match="verification='block'.*set verification='ratio' or 'match'"):
        llama.target.generate(llama.prompts[0][None], logits_processor=[make()], **args)
