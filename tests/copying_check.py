"""Run by hand: `OMP_NUM_THREADS=1 python tests/copying_check.py`. Time and memory per token of the copy index as a text
grows.

Each text is built token by token with a proposal after every token. The times are medians over the last thousand
tokens.
"""

import random
import statistics
import time
import tracemalloc

from hf_dspark.drafting.copying import CopyIndex, CopyMemory

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)


def language(n: int, seed: int = 0) -> list[int]:
    """Tokens with frequencies like a text's (a power law over 49,152), a third of it passages said before."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < n:
        if tokens and rng.random() < 0.05:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + 30]
        tokens += [min(49_151, int(rng.paretovariate(0.8))) for _ in range(3)]
    return tokens[:n]


TEXTS = {
    "language": language,
    "no repetition": lambda n: list(range(n)),
    "one token": lambda n: [7] * n,
    "period 50": lambda n: [i % 50 for i in range(n)],
    "said twice": lambda n: list(range(n // 2)) * 2,
    "two tokens": lambda n: random.Random(0).choices((0, 1), k=n),
}


def seconds(call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(tokens: list[int]) -> tuple[float, float, float]:
    """Microseconds of one `extend`, `propose` and `propose_after` at the end of `tokens`."""
    index, rest = CopyIndex(tokens[:-1000]), iter(tokens[-1000:])
    extend, propose, after = [], [], []
    for token in rest:
        extend.append(seconds(lambda: index.extend([token]), 1))  # noqa: B023 (called at once)
        propose.append(seconds(lambda: index.propose(10), 1))
        after.append(seconds(lambda: index.propose_after(tokens[:5], 10), 1))
    return tuple(1e6 * statistics.median(times) for times in (extend, propose, after))


def memory(build) -> float:
    """Bytes that what `build` returns holds."""
    tracemalloc.start()
    kept = build()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


def main():
    print("text            tokens   extend  propose  propose_after (us)   bytes per token")
    for name, make in TEXTS.items():
        for n in LENGTHS:
            tokens = make(n)
            times = measure(tokens)
            size = memory(lambda: CopyIndex(tokens)) / n  # noqa: B023
            print(f"{name:15} {n:6} {times[0]:8.2f} {times[1]:8.2f} {times[2]:14.2f} {size:17.0f}")

    documents = [language(1_000, seed) for seed in range(200)]
    memory_of = CopyMemory(max_tokens=50_000)

    def fill():
        for document in documents:
            memory_of.add(document)
        return memory_of

    size = memory(fill) / len(memory_of)
    print(f"CopyMemory after 200,000 tokens with max_tokens=50,000: {len(memory_of)} kept, {size:.0f} bytes each")


if __name__ == "__main__":
    main()
