"""The reviewer's page is run, and names only what exists."""

import importlib
import re

from accounting.core.plan import DpSgdPlan


def test_code_blocks_run(root):
    text = (root / "accounting" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_module_named_exists(root):
    text = (root / "accounting" / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([a-z_]+)`", text)) | set(
        re.findall(r"`([a-z_]+)\.[A-Za-z_.]+`", text)
    )
    files = (root / "accounting").rglob("*.py")
    modules = {path.stem: path.relative_to(root).with_suffix("") for path in files}
    packages = (root / "accounting").rglob("__init__.py")
    modules |= {path.parent.name: path.parent.relative_to(root) for path in packages}
    existing = set(modules)
    fields = set(DpSgdPlan.__dataclass_fields__) | set(dir(DpSgdPlan))
    assert names - existing - fields <= {"accounting", "guarantee", "noise_multiplier"}
    for module in names & existing:
        importlib.import_module(".".join(modules[module].parts))
