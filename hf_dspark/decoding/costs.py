"""Which policy decides for a drafter on a target, and where this machine's measured costs of the pair are kept."""

import os
from pathlib import Path
from weakref import WeakKeyDictionary

from hf_dspark.scheduling.cost import CostTable, machine_key
from hf_dspark.scheduling.policy import Policy

_POLICIES: WeakKeyDictionary = WeakKeyDictionary()


def policy_for(drafter, target, speculation) -> Policy:
    """The drafter's policy on this target, made on first use."""
    recursive, asked = drafter.config.recursive, speculation.num_draft_tokens
    longest = drafter.config.max_block
    block = longest if asked is None else min(asked, longest) if drafter.config.fixed_block else asked
    policies = _POLICIES.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    key = block, str(target.dtype), speculation.max_draft_stages
    if key not in policies:
        table = profile_path(drafter, target)
        prior = CostTable.load(table) if table.exists() else None
        policies[key] = Policy(block, speculation.max_draft_stages, prior, recursive)
    return policies[key]


def profile_path(drafter, target) -> Path:
    """Where this machine's measured costs of the pair are kept (written by `hf-dspark profile`)."""
    from huggingface_hub import constants

    name = (
        f"{target.config.name_or_path or type(target).__name__}+{drafter.config.name_or_path or type(drafter).__name__}"
    )
    key = machine_key(name, target.dtype, str(target.device))
    home = Path(os.environ.get("HF_DSPARK_CACHE", Path(constants.HF_HOME) / "hf_dspark"))
    safe = "".join(c if c.isalnum() or c in "-.+" else "_" for c in "-".join(map(str, key.values())))
    return home / "profiles" / f"{safe[-150:]}.json"
