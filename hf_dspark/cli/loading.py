"""Targets and drafters by the names that the command line takes."""

import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from hf_dspark.names import EMBEDDED, check_place, is_hub_id

HEADS = "heads"  # as a drafter: the multi-token-prediction heads in the target's own checkpoint
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
QUANTIZATIONS = {"bnb-4bit": "bitsandbytes", "bnb-8bit": "bitsandbytes", "int8": "torchao", "int4": "torchao"}


def dtype_of(name: str):
    import torch

    if name not in DTYPES:
        raise ValueError(f"--dtype {name} is unknown: use one of {', '.join(DTYPES)}.")
    return name if name == "auto" else getattr(torch, name)


def check_device(name: str | None) -> str | None:
    """Refuse a device that this machine, or this build of torch, doesn't have.

    Raises:
        ValueError: it has none of that name; the message lists what there is.
    """
    import torch

    if name is None:
        return name
    try:
        torch.empty(1, device=name).cpu()
    except Exception as error:  # RuntimeError, AssertionError or NotImplementedError, by device and by build of torch
        found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        found += ["mps"] if torch.backends.mps.is_available() else []
        why = str(error).strip().split("\n")[0].split(": ")[0].rstrip(".")
        raise ValueError(
            f"--device {name} can't be used here ({why}): use one of {', '.join(found)}, or install a build of torch "
            "that knows it."
        ) from None
    return name


def check_target(name: str | None) -> str | None:
    """The callback of every option that names a target: what can't be one is refused before anything is loaded."""
    if name not in (None, EMBEDDED):
        check_place(name, kind="target")
    return name


def check_drafter(name: str | None) -> str | None:
    """The callback of every option that names a drafter: a path that leads nowhere is refused before anything is
    loaded."""
    if name not in (None, "none", HEADS):
        check_place(name)
    return name


def check_hub(name: str, revision: str | None = None) -> None:
    """Ask the Hub once for an id that isn't in the cache, so that a misspelt one isn't tried again and again.

    Raises:
        OSError: it has no such repository, or can't be reached.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if not is_hub_id(name) or isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        HfApi().model_info(name, revision=revision, timeout=10)
    except RepositoryNotFoundError:
        raise OSError(
            f"{name} is no folder here and no repository on the Hub that you may read: check the spelling, or log in "
            "with `hf auth login`."
        ) from None
    except Exception as error:  # whatever else is wrong, the download will meet again and say better
        if "Connect" in type(error).__name__:
            raise OSError(
                f"{name} is no folder here, isn't in the cache, and the Hub can't be reached ({error})."
            ) from None


def _hide_bars() -> None:
    """transformers' progress bars are for a screen; in a file they are one long line."""
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()


def quantization_config(name: str | None):
    """transformers' config for `--quantize`, or None.

    Raises:
        ValueError: an unknown name. ImportError: the library it needs isn't installed.
    """
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise ValueError(f"--quantize {name} is unknown: use one of {', '.join(QUANTIZATIONS)}.")
    library = QUANTIZATIONS[name]
    if find_spec(library) is None:
        raise ImportError(f"--quantize {name} needs {library}, which isn't installed: pip install {library}")
    import transformers

    if library == "bitsandbytes":
        return transformers.BitsAndBytesConfig(load_in_4bit=name == "bnb-4bit", load_in_8bit=name == "bnb-8bit")
    from torchao import quantization

    kind = {"int8": quantization.Int8WeightOnlyConfig, "int4": quantization.Int4WeightOnlyConfig}[name]
    return transformers.TorchAoConfig(kind())


def load_target(name: str, dtype: str = "auto", device: str | None = None, quantize: str | None = None, **options):
    """A target and its tokenizer; `smollm2` is the model of the demo extra.

    Args:
        options: `revision`, `trust_remote_code` and `attn_implementation`, as in `from_pretrained`; None is the
            default.

    Raises:
        OSError: nothing there. ValueError: a wrong dtype or device, a drafter, or files that can't be read.
    """
    import hf_dspark

    hf_dspark.install()  # the command leaves out nearly all of the package until here
    _hide_bars()
    check_target(name)
    kind = dtype_of(dtype)
    check_device(device)
    options = {k: v for k, v in options.items() if v}
    config = quantization_config(quantize)
    if name == EMBEDDED:
        if options or config:
            given = ", ".join(f"--{k.replace('_', '-')}" for k in [*options, *(["quantize"] if config else [])])
            raise ValueError(f"{given} was given for {EMBEDDED}, which comes from a package as it is: leave it out.")
        model, tokenizer = _embedded(kind)
    else:
        _refuse_drafter(name)
        check_hub(name, options.get("revision"))
        model, tokenizer = _pretrained(name, kind, options, config, device)
    return model.to(device) if device and config is None else model, tokenizer


def _embedded(kind):
    import torch
    from transformers.utils.logging import disable_progress_bar

    from hf_dspark.embedded import load_smollm2

    disable_progress_bar()  # "Loading weights", for half a second
    return load_smollm2(torch.float32 if kind == "auto" else kind)


def _pretrained(name, kind, options, config, device):
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {} if config is None else {"quantization_config": config, "device_map": device or "auto"}
    only_model = ("attn_implementation",)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **{k: v for k, v in options.items() if k not in only_model})
        return AutoModelForCausalLM.from_pretrained(name, dtype=kind, **options, **place), tokenizer
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {name} can't be read ({error}): the file is damaged or cut short; get it again."
        ) from error
    except OSError as error:
        raise OSError(f"{name} can't be loaded as a target: {error}") from error


def _refuse_drafter(name: str) -> None:
    from hf_dspark.hub.checkpoint import read_config

    path = Path(name) / "config.json"
    if path.exists() and str(read_config(path).get("model_type", "")).startswith("hf_"):
        raise ValueError(
            f"{name} is a drafter, and a target was expected: give the model that it drafts for, and {name} as the "
            "drafter."
        )


def load_drafter(name, target=None, **overrides):
    """A drafter in any published format, bound to `target` if there is one.

    Raises:
        OSError: nothing there. ValueError: what can't be loaded, or an override that is no field of its config.
    """
    from hf_dspark import AutoDrafter

    _hide_bars()
    if name == HEADS:
        if target is None:
            raise ValueError(
                f"The drafter {HEADS!r} is inside its target's checkpoint, and no target was given: pass --target."
            )
        return AutoDrafter.from_target(target, **overrides)
    check_drafter(str(name))
    check_hub(str(name), overrides.get("revision"))
    try:
        return AutoDrafter.from_pretrained(name, target=target, **overrides)
    except TypeError as error:
        if overrides:  # an option's value, which its user should read about without a traceback
            raise ValueError(str(error)) from error
        raise


def shipped_drafter(cards: Path = Path(__file__).parents[2] / "model_cards") -> Path | None:
    """The drafter for the demo's model that a checkout has in model_cards/, DSpark before others; an installed package
    has none."""
    found = sorted(cards.glob("*smollm2*/config.json"), key=lambda path: ("dspark" not in path.parent.name, path))
    return found[0].parent if found else None


def finite(value):
    """The callback of options that take numbers: nan and inf lie in no range and pass every comparison."""
    import math

    for number in value if isinstance(value, list | tuple) else [value]:
        if number is not None and not math.isfinite(number):
            raise typer.BadParameter(f"{number} is no finite number.")
    return value
