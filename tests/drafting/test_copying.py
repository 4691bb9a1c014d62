"""Copied drafts against a scan of the whole text."""

import pickle
import random
import threading

import pytest
import torch
from safetensors.torch import save_file

from hf_dspark.drafting.copying import COUNTED, Copy, CopyIndex, CopyMemory


def common(text, a, b):
    """How many tokens that end at a and at b agree."""
    n = 0
    while n < COUNTED and min(a, b) - n >= 0 and text[a - n] == text[b - n]:
        n += 1
    return n


def scan(text, limit, shortest=2, longest=8):
    """The slow twin of `CopyIndex.propose`."""
    last = len(text) - 1
    agreement = {end: common(text, end, last) for end in range(last)}
    best = max((min(n, longest) for n in agreement.values()), default=0)
    if best < shortest or limit < 1:
        return Copy([], 0)
    source = max(end for end, n in agreement.items() if min(n, longest) == best)
    return Copy([text[source + 1 + k % (last - source)] for k in range(limit)], agreement[source])


def scan_documents(documents, suffix, limit, shortest=3, longest=8):
    """The slow twin of `CopyMemory.propose`."""
    best = 0, None, 0, 0
    for document in documents:
        for end in range(len(document) - 1):
            n = 0
            while n < COUNTED and end - n >= 0 and n < len(suffix) and document[end - n] == suffix[-1 - n]:
                n += 1
            if n >= shortest and min(n, longest) >= best[0]:
                best = min(n, longest), document, end, n
    if best[1] is None or limit < 1:
        return Copy([], 0)
    return Copy(best[1][best[2] + 1 : best[2] + 1 + limit], best[3])


def random_text(rng, longest=60):
    return rng.choices(range(rng.choice((1, 2, 3, 5, 20))), k=rng.randrange(longest))


def random_lengths(rng):
    shortest = rng.randint(1, 4)
    return shortest, shortest + rng.choice((0, 1, 3, 6, 20))


def de_bruijn(k, n):
    """A cyclic text over k tokens that contains every n-gram once."""
    text, word = [], [0] * k * n

    def extend(t, p):
        if t > n:
            text.extend(word[1 : p + 1] if n % p == 0 else [])
            return
        word[t] = word[t - p]
        extend(t + 1, p)
        for token in range(word[t - p] + 1, k):
            word[t] = token
            extend(t + 1, t)

    extend(1, 1)
    return text


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


ADVERSARIES = {
    "one token": [3] * 200,
    "period 2": [0, 1] * 100,
    "period 7": [0, 0, 1, 0, 2, 0, 1] * 30,
    "de Bruijn": de_bruijn(2, 7) + de_bruijn(2, 7)[:20],
    "de Bruijn over 4": de_bruijn(4, 3),
    "Fibonacci": fibonacci(233),
    "said twice": list(range(100)) * 2,
    "said backwards": list(range(100)) + list(range(99, -1, -1)),
    "longer than counted": ([*range(100), 500] * 3)[:-1],
}


def test_proposals_are_those_of_a_scan_of_the_whole_text():
    for seed in range(4000):
        rng = random.Random(seed)
        text, (shortest, longest), limit = random_text(rng), random_lengths(rng), rng.randrange(12)
        index = CopyIndex(text, shortest, longest)
        assert index.propose(limit) == scan(text, limit, shortest, longest), (text, shortest, longest, limit)


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 8), (2, 8), (3, 40)])
def test_adversarial_texts_are_copied_as_by_a_scan_and_fill_the_index_only_in_proportion(name, lengths):
    text, index = ADVERSARIES[name], CopyIndex((), *lengths)
    for n, token in enumerate(text, 1):
        index.extend([token])
        if n % 9 == 0 or n == len(text):
            assert index.propose(10) == scan(text[:n], 10, *lengths)
        assert len(index._suffixes.latest) <= n * (lengths[1] - lengths[0] + 1)
    assert len(index) == len(text)


def test_a_text_without_repetitions_keeps_one_entry_per_token():
    index = CopyIndex(range(1000))
    assert len(index._suffixes.latest) == 999
    assert index.propose(10) == Copy([], 0)


def test_the_work_per_token_is_bounded_however_long_the_text():
    """Entries looked up, not seconds."""

    class Counting(dict):
        lookups = 0

        def get(self, *args):
            Counting.lookups += 1
            return super().get(*args)

    for text in (*ADVERSARIES.values(), [5] * 5000, random.Random(0).choices(range(3), k=5000)):
        index, Counting.lookups = CopyIndex(), 0
        index._suffixes.latest = Counting()
        index.extend(text)
        assert Counting.lookups <= 7 * len(text)


def test_extending_in_random_chunks_equals_extending_at_once():
    for seed in range(500):
        rng = random.Random(seed)
        text, lengths = random_text(rng), random_lengths(rng)
        index, at = CopyIndex((), *lengths), 0
        while at < len(text):
            n = rng.randint(1, 9)
            index.extend(text[at : at + n])
            index.propose(5)
            index.propose_after([0, 1], 5)
            at += n
        whole = CopyIndex(text, *lengths)
        assert vars(index._suffixes) == vars(whole._suffixes)
        assert index.propose(7) == whole.propose(7)


def test_a_draft_is_continued_as_if_it_were_committed_and_leaves_no_trace():
    for seed in range(4000):
        rng = random.Random(seed)
        text, lengths = random_text(rng), random_lengths(rng)
        drafted = rng.choices(range(3), k=rng.randrange(9))
        if text and rng.random() < 0.5:  # a draft that leads into a known passage
            start = rng.randrange(len(text))
            drafted = text[start : start + 5]
        index = CopyIndex(text, *lengths)
        before = pickle.dumps(index)
        assert index.propose_after(drafted, 6) == scan(text + drafted, 6, *lengths), (text, drafted, lengths)
        assert pickle.dumps(index) == before


def test_a_refused_draft_leaves_no_trace_either():
    index = CopyIndex([1, 2, 3, 1, 2])
    with pytest.raises(ValueError, match="negative"):
        index.propose_after([3, -1], 4)
    with pytest.raises(ValueError, match="negative"):
        index.extend([3, -100])
    with pytest.raises(TypeError):
        index.propose_after([3, 1.5], 4)
    assert len(index) == 5
    assert index.propose(4) == scan([1, 2, 3, 1, 2], 4)


def test_a_copy_goes_on_cyclically_where_it_reaches_the_end_of_the_text():
    assert CopyIndex([7, 8] * 3).propose(5) == Copy([7, 8, 7, 8, 7], 4)
    assert CopyIndex([5] * 4).propose(5) == Copy([5] * 5, 3)
    assert CopyIndex([1, 2, 3, 9, 1, 2]).propose(6) == Copy([3, 9, 1, 2, 3, 9], 2)


def test_the_most_recent_of_equally_long_matches_is_copied_and_a_longer_one_before_it():
    assert CopyIndex([1, 2, 3, 1, 2, 4, 1, 2]).propose(1) == Copy([4], 2)
    assert CopyIndex([9, 1, 2, 3, 1, 2, 4, 9, 1, 2]).propose(1) == Copy([3], 3)


def test_short_matches_are_not_copied():
    assert CopyIndex([1, 2, 3, 1, 2], min_match=3).propose(4) == Copy([], 0)
    assert CopyIndex([1, 2, 3, 1, 2], min_match=2).propose(0) == Copy([], 0)
    assert CopyIndex([1, 2, 3, 4, 2], min_match=1).propose(2) == Copy([3, 4], 1)
    assert CopyIndex().propose(3) == CopyIndex([1]).propose(3) == Copy([], 0)


def test_two_n_grams_with_one_key_never_pass_for_a_match(monkeypatch):
    """Keys of two bits, so that they collide all the time."""
    monkeypatch.setattr("hf_dspark.drafting.copying._MASK", 3)
    matches = 0
    for seed in range(500):
        rng = random.Random(seed)
        text, drafted, memory = random_text(rng), rng.choices(range(3), k=4), CopyMemory(60, min_match=2, max_match=30)
        memory.add(text)
        memory.add(text[::-1])
        for whole, copy in (
            (text, CopyIndex(text, max_match=30).propose(5)),
            (text + drafted, CopyIndex(text).propose_after(drafted, 5)),
        ):
            ends = [end for end in range(len(whole) - 1) if common(whole, end, len(whole) - 1) == copy.match]
            assert copy == Copy([], 0) or (copy.match > 1 and any(whole[end + 1] == copy.tokens[0] for end in ends))
            matches += copy.match
        copy = memory.propose(drafted, 1)
        follows = [*drafted[len(drafted) - copy.match :], *copy.tokens]
        assert copy.match != 1
        assert copy == Copy([], 0) or any(
            follows == document[at : at + len(follows)]
            for document in memory.documents()
            for at in range(len(document))
        )
        matches += copy.match
    assert matches > 500


def test_a_pickled_index_goes_on_where_it_was():
    text = random.Random(0).choices(range(3), k=300)
    index = CopyIndex(text[:200])
    other = pickle.loads(pickle.dumps(index))
    for token in text[200:]:
        index.extend([token])
        other.extend([token])
        assert other.propose(8) == index.propose(8)


@pytest.mark.parametrize("lengths", [(0, 8), (4, 3), (2, COUNTED + 1)])
def test_impossible_match_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="1 <= min_match <= max_match <= 64"):
        CopyIndex((), *lengths)
    with pytest.raises(ValueError, match="1 <= min_match <= max_match <= 64"):
        CopyMemory(10, min_match=lengths[0], max_match=lengths[1])


def same_proposals(memory, other, rng):
    for _ in range(20):
        suffix = rng.choices(range(3), k=rng.randrange(30))
        assert memory.propose(suffix, 6) == other.propose(suffix, 6)


def test_a_memory_answers_as_a_scan_of_the_documents_it_keeps_whatever_was_evicted():
    for seed in range(200):
        rng = random.Random(seed)
        lengths = random_lengths(rng)
        memory = CopyMemory(rng.choice((1, 5, 60, 200)), min_match=lengths[0], max_match=lengths[1])
        added = []
        for _ in range(rng.randrange(30)):
            document = random_text(rng, rng.choice((4, 30, 90)))
            memory.add(document)
            added.append(document[-memory.max_tokens :])
            kept = memory.documents()
            assert sum(map(len, kept)) == len(memory) <= memory.max_tokens
            suffix = rng.choices(range(3), k=rng.randrange(30))
            assert memory.propose(suffix, 6) == scan_documents(kept, suffix, 6, *lengths), (kept, suffix, lengths)
        usable = [document for document in added if len(document) > lengths[0]]
        assert memory.documents() == usable[len(usable) - len(memory.documents()) :]


def test_a_memory_after_evictions_equals_one_built_from_what_is_kept():
    for seed in range(100):
        rng = random.Random(seed)
        memory = CopyMemory(150)
        for _ in range(40):
            memory.add(random_text(rng))
        rebuilt = CopyMemory(150)
        for document in memory.documents():
            rebuilt.add(document)
        same_proposals(memory, rebuilt, rng)


def test_a_memory_stays_bounded_however_much_is_added():
    rng, memory = random.Random(0), CopyMemory(500)
    for n in range(2000):
        memory.add(rng.choices(range(1000), k=rng.randint(4, 40)))
        assert len(memory) > 460 or n < 100
        assert len(memory._suffixes.latest) <= 6 * 500
        assert (
            len(memory._suffixes.tokens) <= 2 * 5 / 4 * 500 + 2
        )  # a break per document, and as much again that has left
    memory.add(range(10_000))
    assert memory.documents() == [list(range(9500, 10_000))]


def test_no_entry_of_an_evicted_document_is_left():
    memory = CopyMemory(100, min_match=2)
    memory.add(random.Random(0).choices(range(4), k=100))
    memory.add(range(100, 200))
    assert len(memory._suffixes.latest) == 98  # the second document's bigrams, the last one left out
    assert min(memory._suffixes.latest.values()) > 100


def test_no_copy_crosses_from_one_document_into_the_next():
    memory = CopyMemory(100, min_match=2)
    memory.add([1, 2, 3, 4])
    memory.add([5, 6, 7])
    assert memory.propose([2, 3], 5) == Copy([4], 2)
    assert memory.propose([3, 4], 5) == Copy([], 0)
    assert memory.propose([4, 5], 5) == Copy([], 0)
    assert memory.propose([3, 4, 5, 6], 5) == Copy([7], 2)


def test_a_saved_memory_proposes_the_same_when_loaded(tmp_path):
    rng, memory = random.Random(0), CopyMemory(300, 49152, "smollm2", 5, 20)
    for _ in range(40):
        memory.add(random_text(rng))
    memory.save(tmp_path / "memory.safetensors")
    loaded = CopyMemory.load(tmp_path / "memory.safetensors", 49152, "smollm2")
    assert loaded.documents() == memory.documents()
    assert (loaded.max_tokens, loaded.vocabulary_size, loaded.tokenizer) == (300, 49152, "smollm2")
    assert (loaded._suffixes.shortest, loaded._suffixes.longest) == (5, 20)
    same_proposals(memory, loaded, rng)
    memory.add([0, 1, 2, 1] * 60)
    loaded.add([0, 1, 2, 1] * 60)
    same_proposals(memory, loaded, rng)


def test_an_empty_memory_without_names_is_saved_and_loaded(tmp_path):
    CopyMemory(7).save(tmp_path / "memory.safetensors")
    loaded = CopyMemory.load(tmp_path / "memory.safetensors")
    assert (len(loaded), loaded.max_tokens, loaded.vocabulary_size, loaded.tokenizer) == (0, 7, None, None)


def test_a_memory_of_another_vocabulary_or_another_file_is_refused(tmp_path):
    memory = CopyMemory(300, tokenizer="smollm2")
    memory.bind(49152)
    memory.bind(49152, "smollm2")
    with pytest.raises(ValueError, match="vocabulary_size=49152, not 32000"):
        memory.bind(32000, "smollm2")
    with pytest.raises(ValueError, match="tokenizer='smollm2', not 'llama'"):
        memory.bind(49152, "llama")
    with pytest.raises(ValueError, match="token id 49152 lies outside"):
        memory.add([1, 2, 3, 49152])
    with pytest.raises(ValueError, match="negative"):
        memory.add([1, 2, 3, -1])
    assert len(memory) == 0
    memory.save(tmp_path / "memory.safetensors")
    with pytest.raises(ValueError, match="tokenizer='smollm2', not 'llama'"):
        CopyMemory.load(tmp_path / "memory.safetensors", tokenizer="llama")
    save_file({"tokens": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is no CopyMemory"):
        CopyMemory.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="keeps nothing"):
        CopyMemory(0)


def test_a_refused_name_settles_nothing():
    memory = CopyMemory(300, tokenizer="smollm2")
    with pytest.raises(ValueError):
        memory.bind(32000, "llama")
    memory.bind(49152, "smollm2")
    assert memory.vocabulary_size == 49152


def test_no_document_is_added_while_a_copy_is_looked_up():
    memory = CopyMemory(10)
    memory.add(range(10))
    find, writer = memory._suffixes.find, threading.Thread(target=memory.add, args=(range(100, 110),))

    def interrupted(suffix):
        source = find(suffix)
        writer.start()
        writer.join(0.1)
        return source

    memory._suffixes.find = interrupted
    assert memory.propose([2, 3, 4], 4) == Copy([5, 6, 7, 8], 3)
    writer.join()
    assert memory.documents() == [list(range(100, 110))]


def test_no_copy_is_looked_up_while_a_document_is_added():
    memory, copies = CopyMemory(10), []
    reader = threading.Thread(target=lambda: copies.append(memory.propose([100, 101, 102], 4)))
    insert = memory._suffixes.insert

    def interrupted(end):
        source = insert(end)
        if not reader.ident and end > 4:
            reader.start()
            reader.join(0.1)
        return source

    memory._suffixes.insert = interrupted
    memory.add([0, 100, 101, 102, 7, 100, 101, 102, 8])
    reader.join()
    assert copies == [Copy([8], 3)]
