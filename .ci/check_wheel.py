"""Import everything in the installed package, and check that it all comes from the wheel under its public name."""

import importlib
import pkgutil
import sys

import hf_dspark

names = [module.name for module in pkgutil.walk_packages(hf_dspark.__path__, "hf_dspark.")]
modules = [hf_dspark, *map(importlib.import_module, names)]

strays = [module for module in modules if not str(module.__file__).startswith(sys.prefix)]
assert not strays, f"not from the wheel: {strays}"
assert "hf_dspark.modeling" in names, f"no hf_dspark.modeling among {names}"
assert "modeling" not in sys.modules, "something imported the top-level name modeling"
for name in hf_dspark.__all__:
    getattr(hf_dspark, name)
