"""The clock that every way of generating is timed with."""

import time
import types

import pytest
import tiny
import torch

from hf_dspark.evaluation.timing import Busy, Clock


def test_prefill_and_the_tokens_that_come_with_it_are_left_out():
    times = iter([10.0, 10.5, 12.5])
    clock = Clock(lambda: next(times))
    clock.put(torch.zeros(1, 30))  # the prompt
    for tokens in (1, 3, 1):
        clock.put(torch.zeros(tokens))
    clock.end()
    assert (clock.prefill_seconds, clock.decode_seconds, clock.seconds) == (0.5, 2.0, 2.5)
    assert (clock.tokens, clock.decode_tokens, clock.seconds_per_token) == (5, 4, 0.5)
    assert clock.puts == [1, 3, 1]


@pytest.mark.parametrize("way", ["plain", "lookup", "drafter"])
def test_all_ways_of_generating_tell_the_clock_every_token(llama, way):
    options = {
        "plain": {},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "drafter": {"assistant_model": tiny.good(llama.texts)},
    }
    clock, ids = Clock(), llama.prompts[0][None]
    llama.target.generate(ids, max_new_tokens=tiny.NEW, do_sample=False, streamer=clock, **options[way])
    assert clock.tokens == tiny.NEW and (max(clock.puts) > 1) == (way != "plain" and len(clock.puts) < tiny.NEW)
    assert 0 < clock.prefill_seconds < clock.seconds


def test_a_process_that_has_to_wait_is_busy_elsewhere():
    with Busy() as idle:
        time.sleep(0.2)
    assert idle.share < 0.5 and "quiet machine" in idle.warning(torch.device("cpu"))[0]
    assert not idle.warning(types.SimpleNamespace(type="cuda"))
    idle.share = 0.9
    assert not idle.warning(torch.device("cpu"))
