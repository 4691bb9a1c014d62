"""Names of models: folders, ids on the Hub, and the demo's target. Nothing is read and nobody is asked; imports no
torch."""

from difflib import get_close_matches
from pathlib import Path

EMBEDDED = "smollm2"  # what commands and examples call the model of the demo extra
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # its id on the Hub
OWNERLESS = {
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "distilgpt2",
    "openai-gpt",
}  # ids from the Hub's first years


def is_hub_id(name: str | None) -> bool:
    """Whether `name` reads owner/name and is no folder here."""
    parts = (name or "").split("/")
    return len(parts) == 2 and all(p and p[0] not in ".~" and "\\" not in p for p in parts) and not Path(name).exists()


def check_place(name: str, subfolder: str = "", kind: str = "drafter") -> None:
    """Refuse what is no model's folder and can't be an id on the Hub, which would be asked for half a minute.

    Args:
        name (`str`): a folder or an id.
        subfolder (`str`): where in it the model lies.
        kind (`str`): `"drafter"` or `"target"`, for the message.

    Raises:
        OSError: a file, a folder without `config.json`, or a path that leads nowhere.
    """
    path = Path(name)
    if path.is_file():
        raise OSError(f"{name} is a file, and a {kind} is a folder of config.json and weights: give the folder.")
    if path.is_dir() and not (path / subfolder / "config.json").is_file():
        inside = [str(config.parent) for config in sorted((path / subfolder).glob("*/config.json"))]
        raise OSError(
            f"{path / subfolder} was given as a {kind}, and there is no config.json in it: give the folder that "
            "config.json and the weights lie in" + (f", such as {inside[-1]}." if inside else ".")
        )
    if not path.is_dir() and _is_path(name) and not (kind == "target" and name in OWNERLESS):
        raise OSError(
            f"{name} was given as a {kind}, and there is no such folder (from {Path.cwd()}); an id on the Hub would "
            f"read owner/name: give a folder of config.json and weights, or such an id.{_similar(path, kind)}"
        )


def _is_path(name: str) -> bool:
    """Whether a name that is no folder was meant as one: it can't be an id, or its first part is a folder here."""
    parts = name.split("/")
    return not is_hub_id(name) or Path(parts[0]).is_dir()


def _similar(path: Path, kind: str) -> str:
    folders = {str(c.parent): c.parent.name for c in sorted(path.parent.glob("*/config.json"))}
    names = folders | ({EMBEDDED: EMBEDDED} if kind == "target" else {})
    close = get_close_matches(path.name.lower(), names.values(), 1)
    return next((f" Did you mean {name}?" for name, word in names.items() if word in close), "")
