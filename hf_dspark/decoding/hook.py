"""How `target.generate(assistant_model=drafter)` reaches our loop: the only file that patches transformers."""

import functools
from os import PathLike

from transformers import GenerationConfig, GenerationMixin

from .generate import check_call, speculative_generate

MARK = "_hf_dspark"
_original: dict = {}


def _is_ours(assistant) -> bool:
    # A marker, never isinstance: a drafter loaded as remote code is another class object.
    return getattr(assistant, "is_hf_drafter", False)


def _wrap_decoding(original):
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, **kwargs):
        if _is_ours(kwargs.get("assistant_model")):
            return speculative_generate(self, input_ids, *args, stock=original, **kwargs)
        return original(self, input_ids, *args, **kwargs)

    setattr(_assisted_decoding, MARK, True)
    return _assisted_decoding


def _wrap_validation(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs, *args, **kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, str | PathLike):
            raise ValueError(
                f"assistant_model={str(assistant)!r} is a name, and generate() takes a model that is loaded already: "
                f"pass assistant_model=AutoDrafter.from_pretrained({str(assistant)!r}, target=...), or another loaded "
                "model."
            )
        if not _is_ours(assistant):
            if getattr(generation_config, "speculation", None) is not None:
                raise ValueError(
                    "speculation= was given, and assistant_model is "
                    f"{'missing' if assistant is None else type(assistant).__name__}: these knobs belong to this "
                    "library's drafters. Pass assistant_model=drafter (see AutoDrafter), or drop speculation=."
                )
            return original(self, generation_mode, generation_config, generation_mode_kwargs, *args, **kwargs)
        return check_call(self, assistant, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


_WRAPPERS = {"_assisted_decoding": _wrap_decoding, "_validate_generation_mode": _wrap_validation}


def install() -> None:
    """Let `generate(assistant_model=...)` accept this library's drafters; `import hf_dspark` calls it.

    It replaces two methods of transformers' `GenerationMixin`. A second call changes nothing. Other assistants take
    transformers' own path.
    """
    GenerationConfig.speculation = None  # makes the keyword legal
    if getattr(GenerationMixin._assisted_decoding, MARK, False):
        return
    for name, wrap in _WRAPPERS.items():
        _original[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, wrap(_original[name]))


def uninstall() -> None:
    """Undo [`install`]: put transformers' own methods back. Models given to [`attach`] keep theirs."""
    for name, original in _original.items():
        setattr(GenerationMixin, name, original)
    _original.clear()


def attach(target):
    """Let one model's `generate` accept this library's drafters, and leave transformers unchanged.

    The model's class becomes a subclass of the same name. The model itself can't be pickled afterwards;
    `save_pretrained` and `deepcopy` work as before.

    Args:
        target (`PreTrainedModel`): the model.

    Returns:
        `target`.
    """
    GenerationConfig.speculation = None
    cls = type(target)
    if not getattr(cls._assisted_decoding, MARK, False):
        methods = {name: wrap(getattr(cls, name)) for name, wrap in _WRAPPERS.items()}
        target.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})
    return target
