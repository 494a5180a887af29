"""The reviewer's page is run, and names only what exists."""

import re


def test_code_blocks_run(root):
    text = (root / "accounting" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
