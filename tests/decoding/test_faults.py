"""What went wrong once, by kind: caches after an interruption, memory that stayed, and errors without words."""

import copy
import gc
import inspect
import os
import subprocess
import sys
import threading
import weakref

import pytest
import tiny
import torch
from transformers import Cache, DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from hf_dspark import DSparkConfig, SpeculationConfig
from hf_dspark.decoding.cache import RaggedLayer, TargetCache
from hf_dspark.decoding.prefill import Prefill
from hf_dspark.decoding.target import Target
from hf_dspark.modeling.draft_cache import RaggedBuffer

SHORT = 6


def run(target, batch, drafter=None, new=SHORT, cache=None, **kwargs):
    if cache is not None:
        kwargs[tiny.CACHE] = cache
    return target.generate(**batch, assistant_model=drafter, max_new_tokens=new, do_sample=False, **kwargs)


def one(llama):
    return dict(input_ids=llama.prompts[0][None], attention_mask=torch.ones(1, len(llama.prompts[0]), dtype=torch.long))


def longer(batch, sequences, seed=5):
    """The batch of a second turn with four new tokens of the user."""
    more = torch.randint(3, tiny.V - 1, (len(sequences), 4), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(len(sequences), sequences.shape[1] + 4, dtype=torch.long)
    mask[:, : batch["input_ids"].shape[1]] = batch["attention_mask"]
    return dict(input_ids=torch.cat([sequences, more], 1), attention_mask=mask)


def expected(llama, batch, new=SHORT):
    return run(llama.target, batch, new=new)


# ---------------------------------------------------------------------- a cache after an interruption


class Stop(BaseException):
    """As Ctrl-C: not an Exception."""


class Failing:
    """Raises in the `at`-th call."""

    def __init__(self, original, at):
        self.original, self.left = original, at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise Stop
        return self.original(*args, **kwargs)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ours", [False, True], ids=["DynamicCache", "TargetCache"])
@pytest.mark.parametrize("where", ["prefill", "round", "inside a forward", "commit"])
def test_an_interrupted_call_leaves_the_users_cache_as_it_was(llama, monkeypatch, rows, ours, where):
    batch = one(llama) if rows == 1 else llama.padded()
    drafter = tiny.make_drafter(llama.target)
    first = run(llama.target, batch, drafter, cache=None if ours else DynamicCache(), return_dict_in_generate=True)
    cache = getattr(first, tiny.CACHE)
    before, length = copy.deepcopy(cache), cache.get_seq_length()
    failing, another = longer(batch, first.sequences), longer(batch, first.sequences, seed=9)
    with monkeypatch.context() as patch:
        if where == "inside a forward":
            norm = llama.target.model.norm
            patch.setattr(norm, "forward", Failing(norm.forward, 2))
        elif where == "commit":
            from hf_dspark.decoding import batch as module

            patch.setattr(module, "commit", Failing(module.commit, rows + 1))
        else:
            forward = Failing(Target.forward, 0 if where == "prefill" else 2)
            patch.setattr(Target, "forward", lambda *args, **kwargs: forward(*args, **kwargs))
        with pytest.raises(Stop):
            run(llama.target, failing, drafter, cache=cache)
    assert cache.get_seq_length() == length
    same = cache.to_dynamic() if ours else cache
    for mine, theirs in zip(same.layers, (before.to_dynamic() if ours else before).layers, strict=True):
        assert mine.keys.equal(theirs.keys) and mine.values.equal(theirs.values)
    assert run(llama.target, another, drafter, cache=cache).equal(expected(llama, another))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("ours", [False, True], ids=["DynamicCache", "TargetCache"])
def test_a_streamer_that_raises_leaves_the_users_cache_as_it_was(llama, error, ours):
    class Streamer:
        def put(self, value):
            if value.numel() < 9:
                raise error

        def end(self): ...

    batch, drafter = one(llama), tiny.make_drafter(llama.target)
    first = run(llama.target, batch, drafter, cache=None if ours else DynamicCache(), return_dict_in_generate=True)
    cache = getattr(first, tiny.CACHE)
    with pytest.raises(error):
        run(llama.target, longer(batch, first.sequences), drafter, cache=cache, streamer=Streamer())
    another = longer(batch, first.sequences, seed=9)
    assert run(llama.target, another, drafter, cache=cache).equal(expected(llama, another))


# ---------------------------------------------------------------------- what transformers' caches can do


def filled(llama):
    batch, drafter = llama.padded(), tiny.make_drafter(llama.target)
    out = run(llama.target, batch, drafter, return_dict_in_generate=True)
    return batch, drafter, out.sequences, getattr(out, tiny.CACHE)


@pytest.mark.parametrize("name", ["batch_select_indices", "reorder_cache", "batch_repeat_interleave"])
def test_rows_of_a_cache_are_moved_with_their_draft_context(llama, name):
    batch, drafter, sequences, cache = filled(llama)
    argument = 2 if name == "batch_repeat_interleave" else torch.tensor([2, 0, 2])
    rows = torch.arange(4).repeat_interleave(2) if name == "batch_repeat_interleave" else argument
    getattr(cache, name)(argument)
    assert (cache.draft.first + cache.draft.lengths).equal(cache.lengths)
    turn = {k: v[rows] for k, v in longer(batch, sequences).items()}
    assert run(llama.target, turn, drafter, cache=cache).equal(expected(llama, turn))


@pytest.mark.parametrize("make", [tiny.make_drafter, tiny.make_eagle3], ids=["block", "chain"])
def test_a_cropped_cache_goes_on_with_another_text(llama, make):
    batch, drafter, sequences, cache = filled(llama)
    before = cache.lengths
    cache.crop(-3)
    assert cache.lengths.equal(before - 3)
    turn = longer({**batch, "input_ids": batch["input_ids"]}, sequences[:, :-2])
    assert run(llama.target, turn, make(llama.target), cache=cache).equal(expected(llama, turn))


def test_cropping_to_a_length_or_beyond_the_start_is_refused(llama):
    cache = filled(llama)[-1]
    for length in (5, -100):
        with pytest.raises(ValueError, match="minus the number of entries"):
            cache.crop(length)


def test_a_reset_cache_is_empty(llama):
    batch, drafter, _, cache = filled(llama)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.draft is None
    assert run(llama.target, batch, drafter, cache=cache).equal(expected(llama, batch))


OURS = {"crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"}
BY_LAYERS = {
    "get_seq_length", "get_query_offset", "get_mask_sizes", "get_max_cache_shape", "get_max_length", "update",
    "early_initialization", "is_initialized", "is_sliding", "is_compileable", "max_batch_size", "max_cache_len",
    "has_previous_state", "batch_size", "is_croppable", "is_linear",
}  # fmt: skip
OFFLOADING = {"offload", "prefetch"}  # of caches made with offloading=True, which ours never is
PAST = {"activate_past_recording", "is_recording_past", "is_dummy"}  # of transformers' own loops: ours never asks
# Of layers that targets with a drafter don't have.
RECURRENT = {"update_conv_state", "update_recurrent_state", "get_conv_state", "get_recurrent_state", "update_indexer"}


def test_every_public_method_of_transformers_caches_is_classified():
    names = {n for n, _ in inspect.getmembers(Cache) if not n.startswith("_")}
    unknown = names - OURS - BY_LAYERS - OFFLOADING - PAST - RECURRENT
    assert not unknown, f"say what TargetCache does about {sorted(unknown)}"
    assert all(name in vars(TargetCache) for name in OURS)


# ---------------------------------------------------------------------- memory


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", [tiny.make_drafter, tiny.make_eagle3], ids=["block", "chain"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_call_leaves_nothing_to_the_garbage_collector(llama, monkeypatch, no_collector, make, kept):
    born = []
    for cls in (TargetCache, RaggedLayer, RaggedBuffer):
        original = cls.__init__

        def init(self, *args, original=original, **kwargs):
            born.append(weakref.ref(self))
            original(self, *args, **kwargs)

        monkeypatch.setattr(cls, "__init__", init)
    drafter = make(llama.target)
    out = run(
        llama.target, llama.padded(), drafter, new=tiny.NEW, eos_token_id=llama.new[1][4], return_dict_in_generate=kept
    )
    assert born
    del out
    assert not [ref() for ref in born if ref() is not None]


def test_many_rows_of_many_lengths_ask_for_few_logits(llama, monkeypatch):
    widths = []
    forward = Target.forward

    def recording(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        widths.append(out.logits.shape[1])
        return out

    monkeypatch.setattr(Target, "forward", recording)
    rows = 2 * Prefill.MANY_ENDS
    prompts = [torch.randint(3, tiny.V - 1, (n + 2,), generator=torch.Generator().manual_seed(n)) for n in range(rows)]
    batch = tiny.padded(prompts)
    out = run(llama.target, batch, tiny.make_drafter(llama.target), new=1)
    assert max(widths) == 1
    assert out.equal(expected(llama, batch, new=1))


def test_a_budget_without_bound_allocates_nothing_in_advance(llama):
    eos = llama.new[0][4]
    out = run(
        llama.target, one(llama), tiny.make_drafter(llama.target), new=10**12, eos_token_id=eos, pad_token_id=tiny.PAD
    )
    assert out[0, 9:].tolist() == llama.new[0][: llama.new[0].index(eos) + 1]


# ---------------------------------------------------------------------- errors in words


def test_processes_that_must_stay_in_step_are_refused(llama):
    with pytest.raises(ValueError, match="synced_gpus=False"):
        run(llama.target, one(llama), tiny.make_drafter(llama.target), synced_gpus=True)


def test_a_target_compiled_as_one_graph_is_refused(fresh_target, llama):
    fresh_target.forward = torch.compile(fresh_target.forward, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="without fullgraph=True"):
        run(fresh_target, one(llama), tiny.make_drafter(llama.target))


def test_a_target_resized_after_binding_is_looked_at_again(fresh_target, llama):
    drafter = tiny.make_drafter(fresh_target)
    run(fresh_target, one(llama), drafter)
    fresh_target.resize_token_embeddings(tiny.V + 3, mean_resizing=False)
    with pytest.raises(ValueError, match=f"vocab_size {tiny.V}"):
        run(fresh_target, one(llama), drafter)


def test_a_head_exchanged_after_binding_is_borrowed_anew(fresh_target):
    drafter = tiny.make_drafter(fresh_target)
    fresh_target.set_output_embeddings(copy.deepcopy(fresh_target.get_output_embeddings()))
    drafter.bind(fresh_target)
    assert drafter._bound["head"] is fresh_target.get_output_embeddings()


def test_a_head_whose_weight_is_a_function_works(fresh_target, llama):
    class Packed(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.weight = lambda: linear.weight

        def forward(self, x):
            return self.linear(x)

    drafter, other = tiny.make_drafter(fresh_target), tiny.make_drafter(fresh_target)
    hidden = torch.randn(2, tiny.HIDDEN, dtype=torch.float64)
    wanted = other.head(hidden)
    fresh_target.set_output_embeddings(Packed(fresh_target.get_output_embeddings()))
    drafter.bind(fresh_target)
    assert drafter.head(hidden).equal(wanted)


@pytest.mark.parametrize("head", ["none", "domino"])
def test_a_confidence_head_needs_the_feature_it_reads(head):
    more = dict(gru_hidden_size=5, correction_size=6) if head == "domino" else {}
    with pytest.raises(ValueError, match="confidence_with_markov=False"):
        DSparkConfig(correction_head=head, confidence_head=True, confidence_with_markov=True, **more)
    DSparkConfig(correction_head=head, confidence_head=False, confidence_with_markov=True, **more)


def test_threads_share_a_target_with_the_stock_engine(llama):
    drafters = [tiny.make_drafter(llama.target, seed=s) for s in range(4)]
    outputs, errors = {}, []

    def work(i):
        try:
            batch = dict(input_ids=llama.prompts[i][None])
            for _ in range(2):
                outputs[i] = run(
                    llama.target, batch, drafters[i], new=tiny.NEW, speculation=SpeculationConfig(engine="stock")
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [outputs[i][0].tolist() for i in range(4)] == llama.texts


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("rows", [1, 4])
def test_a_target_compiled_in_several_graphs_writes_the_same(fresh_target, llama, rows):
    batch = one(llama) if rows == 1 else llama.padded()
    fresh_target.forward = torch.compile(fresh_target.forward, dynamic=True, backend="eager")
    assert run(fresh_target, batch, tiny.good(llama.texts)).equal(expected(llama, batch))


RANK = """
import sys
import torch
import torch.distributed as dist
import tiny

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
case = tiny.load_case("llama")
case.target.model.norm.register_forward_hook(lambda *_: dist.all_reduce(torch.zeros(1)))
try:
    drafter = tiny.make_drafter(case.target)
    case.target.generate(
        case.prompts[0][None], assistant_model=drafter, max_new_tokens=(24, 5)[rank], do_sample=False, synced_gpus=True
    )
except ValueError as error:
    assert "synced_gpus=False" in str(error)
    print("refused")
"""


def test_two_processes_that_share_collectives_do_not_wait_for_each_other(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(tiny.__file__), *sys.path])}
    call = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*call, str(rank), str(tmp_path / "store")], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["refused\n"] * 2


def bytes_of(monkeypatch, call):
    """Most bytes of key-value buffers alive at once, seen after every update of a layer."""
    most, updates = 0, [(RaggedLayer, RaggedLayer.update), (DynamicLayer, DynamicLayer.update)]
    with monkeypatch.context() as patch:
        born = weakref.WeakSet()
        for cls, update in updates:

            def recording(self, *args, update=update, **kwargs):
                nonlocal most
                out = update(self, *args, **kwargs)
                born.add(self)
                held = [getattr(layer, "buffer", layer) for layer in born]
                most = max(most, sum(t.untyped_storage().nbytes() for x in held for t in (x.keys, x.values)))
                return out

            patch.setattr(cls, "update", recording)
        call()
    return most


def test_rows_that_end_one_after_another_hold_little_more_than_plain_generation(llama, monkeypatch, no_collector):
    prompts = [torch.randint(3, tiny.V - 1, (60,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
    batch = tiny.padded(prompts)
    places = {tuple(p.tolist()): i for i, p in enumerate(prompts)}

    class Ends(StoppingCriteria):
        row_wise = True

        def __call__(self, input_ids, scores, **kwargs):
            rows = [places[tuple(ids[:60].tolist())] for ids in input_ids]
            return torch.tensor([input_ids.shape[1] - 60 >= 3 * (i + 1) for i in rows])

    def call(drafter):
        return run(
            llama.target, batch, drafter, new=60, stopping_criteria=StoppingCriteriaList([Ends()]), pad_token_id=0
        )

    texts = call(None).tolist()
    plain = bytes_of(monkeypatch, lambda: call(None))
    ours = bytes_of(monkeypatch, lambda: call(tiny.always_wrong(texts)))
    assert ours < 1.5 * plain
