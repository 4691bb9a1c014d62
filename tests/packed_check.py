"""Run by hand: `OMP_NUM_THREADS=1 python tests/packed_check.py`. Seconds of a target step, packed, padded and of one
row.

SmolLM2-135M-Instruct, four rows of which three send one token and one sends six, against one row that sends nine. The
ways take turns; medians.
"""

import statistics
import time

import torch

from hf_dspark.decoding import packed
from hf_dspark.decoding.target import FeatureTap, Target
from hf_dspark.embedded import load_smollm2

WIDTHS, CONTEXT, ROUNDS = [1, 1, 1, 6], [120, 90, 150, 200], 60


def main(dtype=torch.float32):
    model, _ = load_smollm2(dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 40000, (4, max(CONTEXT)), generator=generator)
    ids = torch.randint(3, 40000, (4, 9), generator=generator)
    with FeatureTap(model, [3, 15, 27]) as tap:
        target = Target(model, tap)
        many, one = target.new_cache(4), target.new_cache(1)
        target.forward(prompts, many, [max(CONTEXT)] * 4)
        target.forward(prompts[:1], one, [max(CONTEXT)])
        many.lengths, one.lengths = torch.tensor(CONTEXT), torch.tensor([max(CONTEXT)])
        ends = [n + w for n, w in zip(CONTEXT, WIDTHS)]

        def step(way):
            packed._AGREES.setdefault(model, {})["sdpa"] = way == "packed"
            if way == "one row":
                return target.forward(ids[:1], one, [max(CONTEXT) + 9])
            return target.forward(ids[:, : max(WIDTHS)], many, ends, widths=WIDTHS)

        times = {way: [] for way in ("one row", "packed", "padded")}
        for _ in range(ROUNDS):
            for way, seconds in times.items():
                began = time.perf_counter()
                step(way)
                tap.features()
                seconds.append(time.perf_counter() - began)
    base = statistics.median(times["one row"])
    for way, seconds in times.items():
        print(
            f"{way:8} {1e3 * statistics.median(seconds):7.1f} ms, {statistics.median(seconds) / base:.2f} of one row's"
        )


if __name__ == "__main__":
    main()
