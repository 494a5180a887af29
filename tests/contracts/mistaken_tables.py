"""Tables and schemas with the mistakes that people make with their own."""

from __future__ import annotations

import pathlib
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

HEAD = "id,age,plan,joined,churned\n"
ROWS = "".join(
    f"{row},{20 + row},{'free' if row % 3 else 'pro'},2023-0{1 + row % 9}-11,"
    f"{'yes' if row % 2 else 'no'}\n"
    for row in range(60)
)
LABEL = '[columns.churned]\nkind = "label"\ntask = "binary"\nclasses = ["no", "yes"]\n'
AGE = '[columns.age]\nkind = "numeric"\n'
GOOD = f"""version = 1
{LABEL}{AGE}[columns.plan]
kind = "category"
[columns.joined]
kind = "date"
parts = ["month"]
"""


def write(root: pathlib.Path) -> None:
    """Writes them to a folder.

    Args:
      root: The folder.
    """
    _write_tables(root)
    _write_schemas(root)


def _write_tables(root: pathlib.Path) -> None:
    texts = {
        "churn": HEAD + ROWS,
        "semicolon": (HEAD + ROWS).replace(",", ";"),
        "headless": ROWS,
        "twice": "age,age,churned\n1,2,no\n",
        "empty": "",
        "word": f"{HEAD}{ROWS}60,old,pro,2023-01-01,no\n",
    }
    for name, text in texts.items():
        (root / f"{name}.csv").write_text(text)
    (root / "mixed").mkdir()
    for name in ("fake.parquet", "churn.xlsx", "mixed/a.csv"):
        shutil.copy(root / "churn.csv", root / name)
    columns = {
        "age": [None, *[30.0] * 59], "plan": ["free"] * 60, "tags": [["a"]] * 60,
        "churned": ["no", "yes"] * 30,
    }  # fmt: skip
    for name in ("t.parquet", "mixed/b.parquet"):
        pq.write_table(pa.table(columns), root / name)


def _write_schemas(root: pathlib.Path) -> None:
    base = f"version = 1\n{LABEL}"
    schemas = {
        "good": GOOD,
        "renamed": base + AGE.replace("age", "agee"),
        "no-user": f'{GOOD}[split]\nby = "hash"\ncolumn = "user"\n',
        "text": f'{base}[columns.plan]\nkind = "numeric"\n',
        "list": f'{base}[columns.tags]\nkind = "category"\n',
        "strict": f'{base}{AGE}missing = "refuse"\n',
        "cut-users": f'{base}[columns.id]\nkind = "user"\n[split]\nby = "hash"\n'
        'column = "churned"\ncut_users = true\n',
    }
    for name, text in schemas.items():
        (root / f"{name}.toml").write_text(text)
