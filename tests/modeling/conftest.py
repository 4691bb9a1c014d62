"""Tiny random drafters and a target. Every parameter is random, so that a swapped or forgotten norm shows."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark.modeling import DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter

BODY = dict(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    target_layer_ids=(0, 2),
    num_target_layers=4,
    rope_parameters={"rope_theta": 50.0, "rope_type": "default"},
)


def randomise(model, seed: int):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.3 * noise if "norm" in name else noise * p.shape[-1] ** -0.5)
    return model.double().eval()


@pytest.fixture(scope="session")
def target():
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    return randomise(LlamaForCausalLM(config), 1)


def builder(config_class, drafter_class, target):
    def make(seed=0, bind=True, **overrides):
        drafter = randomise(drafter_class(config_class(**{**BODY, **overrides})), seed)
        return drafter.bind(target) if bind else drafter

    return make


@pytest.fixture
def make_dspark(target):
    return builder(DSparkConfig, DSparkDrafter, target)


@pytest.fixture
def make_eagle3(target):
    return builder(Eagle3Config, Eagle3Drafter, target)


@pytest.fixture
def draw():
    """Seeded features [B, T, 32] and tokens [B, T]."""
    generator = torch.Generator().manual_seed(7)

    def make(*shape):
        features = torch.randn(*shape, 32, generator=generator, dtype=torch.float64)
        return features, torch.randint(0, 29, shape, generator=generator)

    return make


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield
