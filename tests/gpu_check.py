"""Run by hand on a CUDA machine: `python tests/gpu_check.py`. Random models, under four minutes, one line per check.

Keyed equality in float32 on the GPU and against the CPU, sdpa and (where installed) flash attention at equal lengths,
bf16, drafter and target on different devices, and the loop's overhead per round at Qwen3-4B shapes.
"""

import copy
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import is_flash_attn_2_available

from hf_dspark import DSparkConfig, DSparkDrafter, SpeculationConfig, keyed_processors

SMALL = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)
QWEN3_4B = dict(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def pair(shape, dtype, device, attention="sdpa", drafter_device=None, layers=2):
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen3Config(
            **shape, head_dim=shape["hidden_size"] // shape["num_attention_heads"], eos_token_id=None, pad_token_id=0
        )
        target = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
        for p in target.parameters():
            if p.dim() > 1 and shape is SMALL:
                torch.nn.init.normal_(p, std=0.1)
    body = {k: shape[k] for k in shape if k != "num_hidden_layers"}
    n = shape["num_hidden_layers"]
    config = DSparkConfig(
        **body, head_dim=config.head_dim, num_hidden_layers=layers, block_size=7, mask_token_id=shape["vocab_size"] - 1,
        target_layer_ids=[1, n // 2, n - 3], num_target_layers=n, correction_head="markov", markov_rank=256,
        confidence_head=True,
    )  # fmt: skip
    with torch.device(drafter_device or device):
        drafter = DSparkDrafter(config).to(dtype).eval()
    return target, drafter.to(drafter_device or device).bind(target)


def inputs(rows, device, ragged=True):
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 500, (rows, 24)), torch.ones(rows, 24, dtype=torch.long)
    for r in range(rows if ragged else 0):
        mask[r, : 3 * r] = 0
    return dict(input_ids=(ids * mask).to(device), attention_mask=mask.to(device))


def keyed(target, drafter, batch, seed):
    config = copy.deepcopy(target.generation_config)
    config.temperature, config.top_k = 0.8, 50
    call = dict(**batch, max_new_tokens=48)
    plain = target.generate(**call, do_sample=False, logits_processor=keyed_processors(config, seed, 24))
    speculation = SpeculationConfig(verification="match", seed=seed, loop_gate=-20.0, max_draft_stages=3)
    fast = target.generate(
        **call, do_sample=True, temperature=0.8, top_k=50, assistant_model=drafter, speculation=speculation
    )
    return plain, fast


def report(name, passed, note=""):
    print(f"{'ok  ' if passed else 'FAIL'} {name} {note}", flush=True)
    return passed


def overhead(target, drafter, rows):
    batch = inputs(rows, target.device)
    for _ in range(2):
        target.generate(**batch, assistant_model=drafter, max_new_tokens=64, do_sample=False)
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.generate(**batch, assistant_model=drafter, max_new_tokens=128, do_sample=False)
    torch.cuda.synchronize()
    stats = drafter.last_speculation
    rounds = len(stats.acceptance_lengths[0])
    parts = {n: getattr(stats, f"{n}_seconds") for n in ("draft", "verify", "overhead")}
    text = ", ".join(f"{n} {1e3 * s / rounds:.2f} ms" for n, s in parts.items())
    return f"{rows} rows, per round: {text}; {time.perf_counter() - began:.1f} s in all"


def main():
    assert torch.cuda.is_available(), "this check is for a CUDA machine"
    print(torch.cuda.get_device_name(), torch.__version__)
    torch.backends.cuda.matmul.allow_tf32 = False
    ok = True
    target, drafter = pair(SMALL, torch.float32, "cuda")
    batch = inputs(4, "cuda")
    for seed in range(5):
        plain, fast = keyed(target, drafter, batch, seed)
        ok &= report(f"keyed equality, float32, ragged batch, seed {seed}", torch.equal(plain, fast))
    cpu = copy.deepcopy(target).cpu()
    on_cpu = keyed(cpu, copy.deepcopy(drafter).cpu().bind(cpu), inputs(4, "cpu"), 0)[0]
    on_gpu = keyed(target, drafter, batch, 0)[0].cpu()
    report(
        "keyed text equal on CPU and GPU (same noise; logits may round)",
        True,
        f"{(on_cpu == on_gpu).float().mean():.3f} of tokens",
    )
    ok &= report(
        "drafter on the CPU, target on the GPU",
        torch.equal(*keyed(*pair(SMALL, torch.float32, "cuda", drafter_device="cpu"), batch, 1)),
    )
    target, drafter = pair(SMALL, torch.bfloat16, "cuda")
    plain, fast = keyed(target, drafter, batch, 0)
    report("bf16 runs", fast.shape[0] == 4, f"{(plain == fast).float().mean():.3f} of tokens equal (kernel rounding)")
    if is_flash_attn_2_available():
        target, drafter = pair(SMALL, torch.bfloat16, "cuda", "flash_attention_2")
        out = target.generate(
            **inputs(1, "cuda", ragged=False), assistant_model=drafter, max_new_tokens=32, do_sample=False
        )
        ok &= report("flash attention at equal lengths", out.shape[1] == 56)
    else:
        print("skip flash attention: not installed")
    target, drafter = pair(QWEN3_4B, torch.bfloat16, "cuda", layers=5)
    for rows in (1, 4):
        print("Qwen3-4B shapes:", overhead(target, drafter, rows), flush=True)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
