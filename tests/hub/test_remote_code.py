"""A drafter that ships its code loads where the package isn't installed, and says what drafting needs."""

import json
import os
import subprocess
import sys

import golden
import torch
from golden import load_drafter, load_target
from transformers import AutoConfig, AutoModel

ALONE = """
import sys

class Hidden:
    def find_spec(self, name, *args):
        if name.split(".")[0] in ("hf_dspark", "modeling"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Hidden())

import torch
from transformers import AutoModel, AutoModelForCausalLM

def first_logits(drafter):
    features = torch.linspace(-1, 1, 5 * drafter.fc.in_features).view(1, 5, -1)
    tokens = torch.arange(5, 10)[None]
    cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        seed = drafter.extend(cache, features, tokens, torch.ones(1, 5, dtype=torch.bool))
        return drafter.step(cache, drafter.start(cache, tokens[:, -1], seed), tokens[:, -1])[0]

fixtures, out, *names = sys.argv[1:]
for name in names:
    drafter = AutoModel.from_pretrained(f"{out}/{name}", trust_remote_code=True).eval()
    target = AutoModelForCausalLM.from_pretrained(f"{fixtures}/{name}/target", dtype=torch.float32)
    drafter.bind(target)
    torch.save(first_logits(drafter), f"{out}/{name}/logits.pt")
    drafter.save_pretrained(f"{out}/{name}/again")
    try:
        target.generate(torch.arange(5, 10)[None], assistant_model=drafter, max_new_tokens=3)
    except Exception as error:
        print("SAYS:", error)
"""
NAMES = ["speculators-dspark-vanilla-anchor", "safeailab-eagle3-llama"]


def first_logits(drafter):
    features = torch.linspace(-1, 1, 5 * drafter.fc.in_features).view(1, 5, -1)
    tokens = torch.arange(5, 10)[None]
    cache = drafter.new_cache(torch.zeros(1, dtype=torch.long))
    with torch.no_grad():
        seed = drafter.extend(cache, features, tokens, torch.ones(1, 5, dtype=torch.bool))
        return drafter.step(cache, drafter.start(cache, tokens[:, -1], seed), tokens[:, -1])[0]


def test_shipped_code_drafts_the_same_without_the_package_and_says_what_generating_needs(tmp_path):
    for name in NAMES:
        load_drafter(name).save_pretrained(tmp_path / name, ship_code=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-c", ALONE, str(golden.ROOT), str(tmp_path), *NAMES],
        cwd=tmp_path,
        env=environment | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.count("pip install hf-dspark") == len(NAMES)
    for name in NAMES:
        logits = torch.load(tmp_path / name / "logits.pt")
        torch.testing.assert_close(logits, first_logits(load_drafter(name)), atol=1e-6, rtol=1e-6)
        assert (tmp_path / name / "again" / "drafter.py").exists()  # re-saved there, it still carries its code


def test_code_is_shipped_only_on_request_and_only_once(tmp_path):
    drafter = load_drafter("zlab-dflash-b8")
    drafter.save_pretrained(tmp_path / "shipped", ship_code=True)
    files = {p.name for p in (tmp_path / "shipped").glob("*.py")}
    assert files >= {"modeling_dspark.py", "configuration_dspark.py", "drafter.py", "layers.py", "heads.py"}
    auto_map = json.loads((tmp_path / "shipped" / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkDrafter"}

    again = golden.AutoDrafter.from_pretrained(tmp_path / "shipped", target=load_target("zlab-dflash-b8"))
    for n, plain in enumerate((drafter, again)):
        plain.save_pretrained(tmp_path / f"plain{n}")
        assert not list((tmp_path / f"plain{n}").glob("*.py"))
        assert "auto_map" not in json.loads((tmp_path / f"plain{n}" / "config.json").read_text())


def test_transformers_auto_classes_know_our_types_once_the_package_is_imported(tmp_path):
    drafter = load_drafter("zlab-dflash-b8")
    drafter.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(drafter.config)
    assert type(AutoModel.from_pretrained(tmp_path)) is type(drafter)
