"""`AutoDrafter`: any published drafter checkpoint, local or on the Hub, as one of ours."""

from difflib import get_close_matches
from os import PathLike

import torch
from transformers import AutoConfig, AutoModel

from hf_dspark.modeling import AssistantDrafter, DSparkDrafter, Eagle3Drafter, MTPDrafter
from hf_dspark.modeling.drafter import check_target

from .hub.assistants import import_assistant
from .hub.checkpoint import Checkpoint
from .hub.formats import detect
from .hub.heads import heads_of, import_heads
from .hub.importer import BORROWED, import_drafter
from .names import EMBEDDED

OWN = {cls.config_class.model_type: cls for cls in (DSparkDrafter, Eagle3Drafter, MTPDrafter, AssistantDrafter)}
for model_type, drafter_class in OWN.items():
    AutoConfig.register(model_type, drafter_class.config_class, exist_ok=True)
    AutoModel.register(drafter_class.config_class, drafter_class, exist_ok=True)


class AutoDrafter:
    """Loads drafters of every supported format; see [`AutoDrafter.from_pretrained`] and [`AutoDrafter.from_target`]."""

    def __init__(self):
        raise TypeError("AutoDrafter can't be instantiated: call AutoDrafter.from_pretrained(repo_or_path).")

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path,
        target=None,
        dtype=None,
        device_map=None,
        revision=None,
        token=None,
        cache_dir=None,
        local_files_only=False,
        force_download=False,
        subfolder="",
        trust_remote_code=False,
        **overrides,
    ):
        """Load a drafter in any published format, strictly.

        Every tensor is loaded or borrowed from the target; an error names those that are missing or unknown. With
        `target`, a drafter of other sizes is refused before its weights are fetched, and the drafter is bound to the
        target.

        Args:
            repo_or_path (`str` or `PathLike`): a Hub id, or a folder with `config.json` and weights.
            target (`PreTrainedModel`, *optional*): the model to draft for. Its dtype and device are the defaults.
            dtype (`torch.dtype` or `str`, *optional*): defaults to the target's, else the file's.
            device_map (`str`, `torch.device` or `dict`, *optional*): where to put the drafter.
            revision (`str`, *optional*): branch, tag or commit on the Hub; the default branch if not given.
            token (`str` or `bool`, *optional*): access token, as in `huggingface_hub`.
            cache_dir (`str` or `PathLike`, *optional*): folder for downloads; `huggingface_hub`'s if not given.
            local_files_only (`bool`, defaults to `False`): use the cache, never the network.
            force_download (`bool`, defaults to `False`): download again.
            subfolder (`str`, defaults to `""`): folder inside the repository.
            trust_remote_code (`bool`, defaults to `False`): accepted as for other models; code from a checkpoint is
                never run.
            overrides: fields of the drafter's config that the file leaves open or states wrongly, such as
                `sample_from_anchor=True` or `target_layer_ids=[1, 9, 17]` (0-based layer outputs).

        Returns:
            [`DSparkDrafter`], [`Eagle3Drafter`], [`MTPDrafter`] or [`AssistantDrafter`], in eval mode.
            `drafter.sources` says where each tensor came from.

        Raises:
            TypeError: `target` is no loaded model, or an override is no field of a drafter's config.
            OSError: there is no such folder or repository, or the Hub can't be reached.
            ValueError: an unsupported format, a config that contradicts itself or the tensors, a target of other
                sizes, or a tensor that is missing, unknown or of another shape.
        """
        hub = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        _check_fields(overrides)
        _check_loaded(target)
        checkpoint = Checkpoint.open(repo_or_path, subfolder=subfolder, **hub)
        load = {"dtype": dtype or getattr(target, "dtype", None)}
        if isinstance(device_map, dict) or device_map in ("auto", "balanced", "sequential"):
            load["device_map"] = device_map
        family = detect(checkpoint.name, checkpoint.config)
        if family == "hf":
            drafter = _load_own(checkpoint, target, load, overrides, subfolder=subfolder, **hub)
        elif family == "mtp":
            drafter = import_heads(checkpoint, getattr(target, "config", None), overrides, **load)
        elif family == "assistant":
            drafter = import_assistant(checkpoint, target, overrides, **load)
        else:
            drafter = import_drafter(checkpoint, getattr(target, "config", None), overrides, **load)
        if "device_map" not in load and (place := device_map or _device_of(target)) is not None:
            drafter.to(torch.device(place))
        return _finished(drafter, target)

    @classmethod
    def from_target(
        cls, target, dtype=None, revision=None, token=None, cache_dir=None, local_files_only=False, **overrides
    ):
        """Make a drafter of the multi-token-prediction heads in the target's own checkpoint (arXiv 2412.19437, section
        2.2).

        The heads are read from the folder or repository that the target was loaded from. Embedding and output layer are
        the target's. The drafter is bound to the target.

        Args:
            target (`PreTrainedModel`): loaded with `from_pretrained`.
            dtype (`torch.dtype`, *optional*): defaults to the target's.
            revision (`str`, *optional*): defaults to the one the target was loaded from.
            token (`str` or `bool`, *optional*): access token, as in `huggingface_hub`.
            cache_dir (`str` or `PathLike`, *optional*): folder for downloads; `huggingface_hub`'s if not given.
            local_files_only (`bool`, defaults to `False`): use the cache, never the network.
            overrides: fields of [`MTPConfig`], such as `chain_length=3`: a single head is then fed its own output.

        Returns:
            [`MTPDrafter`], in eval mode.

        Raises:
            ValueError: the checkpoint holds no heads, or tensors that are missing, unknown or of another shape.
        """
        _check_fields(overrides)
        hub = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        drafter = heads_of(target, overrides, revision, None if dtype == "auto" else dtype, **hub)
        if (place := _device_of(target)) is not None:
            drafter.to(place)
        return _finished(drafter, target)


def _finished(drafter, target):
    for name in drafter.config.borrows:
        drafter.sources[f"{name}.weight"] = BORROWED
    if target is not None:
        drafter.bind(target)
    return drafter.eval()


def _check_fields(overrides):
    known = set().union(*(cls.config_class().to_dict() for cls in OWN.values()))
    for name in overrides.keys() - known:
        close = get_close_matches(name, known, 1)
        raise TypeError(
            f"AutoDrafter.from_pretrained got {name!r}, which is no field of a drafter's config"
            + (f": did you mean {close[0]!r}?" if close else f": known are {', '.join(sorted(known))}.")
        )


def _check_loaded(target):
    if target is None or hasattr(target, "config") and hasattr(target, "get_input_embeddings"):
        return
    if isinstance(target, str | PathLike):
        load = "load_smollm2()[0] (from hf_dspark.embedded)" if target == EMBEDDED else None
        load = load or f"AutoModelForCausalLM.from_pretrained({str(target)!r})"
        raise TypeError(
            f"target={str(target)!r} is a name, and a drafter is bound to a loaded model: pass target={load}."
        )
    raise TypeError(
        f"target is a {type(target).__name__}, and a drafter is bound to a loaded model: pass the model itself."
    )


def _load_own(checkpoint, target, load, overrides, **hub):
    cls = OWN.get(checkpoint.config["model_type"])
    if cls is None:
        raise ValueError(
            f"{checkpoint.name} has model_type={checkpoint.config['model_type']!r}, which this version doesn't know "
            f"(known are {', '.join(OWN)}): upgrade with `pip install -U hf-dspark`."
        )
    if target is not None:
        check_target(cls.config_class.from_dict({**checkpoint.config, **overrides}), target.config)
    if load["dtype"] is None:
        del load["dtype"]
    _ = checkpoint.files  # fetched here, where downloads are checked
    drafter = cls.from_pretrained(checkpoint.name, **load, **overrides, **hub)
    drafter.sources = dict.fromkeys(drafter.state_dict(), checkpoint.name)
    return drafter


def _device_of(target):
    device = getattr(target, "device", None)
    return None if device is None or device.type == "meta" else device
