"""Shared by all tests: the models of tiny.py as fixtures, quiet loggers, one seed."""

import logging

import pytest
import tiny
import torch


@pytest.fixture(autouse=True)
def quiet_about_padding():
    """transformers warns on every right-padded batch, which here is the point."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(params=tiny.TARGETS, scope="session")
def case(request):
    """Each tiny target in turn, with ragged prompts and their greedy texts."""
    return tiny.load_case(request.param)


@pytest.fixture(scope="session")
def llama():
    """The Llama among them."""
    return tiny.load_case("llama")


@pytest.fixture
def fresh_target():
    """A target of a test's own, which it may change."""
    return tiny.make_target(**tiny.TARGETS["llama"][2])


@pytest.fixture(autouse=True)
def one_generator():
    torch.manual_seed(0)
