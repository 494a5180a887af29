"""The files of the user's code that a run is made of.

Formal guarantees:
  - ``digests`` covers the modules it is given, and whatever those import, at any depth:
    at their top or within a function, absolute or relative, by a statement or by
    ``import_module`` of a literal name.  It follows the source and runs none of it.
  - It leaves out the standard library, installed packages and this project, which
    ``origin`` covers by their versions.
  - ``check_function`` refuses a module that is not there, and one whose source does not
    parse or has no such word; it imports nothing.
  - ``changed`` names every file of ``digests`` whose bytes differ now, or that is gone.

What code imports under a computed name, or reads, is not covered; ``graph_digest``
covers its effect on the step.

Public: names and digests.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accounting.validation import InputError
from trainer.model.user_code import (
    check_name,
    import_from_here,
    is_users_file,
    one_line_errors,
    remedy_of,
)

#: With these a module may have names that its source does not show.
_BINDS_UNSEEN = {"*", "__getattr__", "exec", "globals", "setattr", "vars"}
_IMPORTERS = ("import_module", "__import__")


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of each module of the user's, and of those they import.

    Example:
      >>> digests(["json", "trainer.settings.train_settings"])
      {}
    """
    found: dict[str, str] = {}
    seen, waiting = set[str](), list(modules)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting += _parents(name)
        file = file_of(name)
        if file is not None and is_users_file(file):
            source = _read(name, file)
            found[name] = hashlib.sha256(source).hexdigest()
            waiting += _imported(source, name, file)
    return dict(sorted(found.items()))


def changed(recorded: Mapping[str, str]) -> list[str]:
    """Returns the modules of ``recorded`` that are no longer what they were."""
    import_from_here()
    return [name for name, digest in recorded.items() if _digest(name) != digest]


def _digest(name: str) -> str | None:
    file = file_of(name)
    try:
        return file and hashlib.sha256(_read(name, file)).hexdigest()
    except InputError:
        return None


def check_function(spec: str, option: str) -> None:
    """Accepts ``module:function`` whose module is found and speaks of the function.

    Looks at the source and runs none of it, so that a wrong name is found before
    TensorFlow loads; ``load_function`` says the rest.

    Args:
      spec: What the user wrote.
      option: Name of the flag.

    Raises:
      InputError: no such module, one that is not Python, or the name is not in it.
    """
    name, function = check_name(spec, option)
    import_from_here()
    if name in sys.modules:
        return
    what, remedy = f"{option}={spec!r}", remedy_of(option)
    found = _spec(name)
    if found is None:
        raise InputError(
            f"Expected {what} to be importable; there is no module {name!r}. {remedy}"
        )
    file = file_of(name)
    if file is None or not file.endswith(".py"):
        return
    with one_line_errors(what):
        words = _words(ast.parse(_read(name, file), file))
    if function not in words and not words & _BINDS_UNSEEN:
        raise InputError(
            f"Expected {what} to name a function; {file} has none of that name. "
            f"{remedy}"
        )


def _words(tree: ast.AST) -> set[str]:
    """Returns every name that a source binds, uses or imports."""
    fields = ("name", "id", "asname", "attr")
    found = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return {word for word in found if isinstance(word, str)}


def file_of(name: str) -> str | None:
    """Returns the file of a module, without importing it; None if it has none."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    spec = _spec(name)
    return spec.origin if spec is not None and spec.has_location else None


def _spec(name: str) -> Any:
    """As ``importlib.util.find_spec``, which would import the parents."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        path = getattr(_spec(parent), "submodule_search_locations", None)
        if path is None:
            return None
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    try:
        return next((spec for spec in found if spec is not None), None)
    except KeyError:  # a folder without __init__.py, in one that is not imported
        return _folder_spec(name, path)


def _folder_spec(name: str, path: Any) -> Any:
    """Returns the spec of folders without ``__init__.py``, which Python makes later."""
    folders = [os.path.join(each, name.rpartition(".")[2]) for each in path or ()]
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(filter(os.path.isdir, folders))
    return spec


def _read(name: str, file: str) -> bytes:
    # The loader knows files in archives too.
    loader = getattr(_spec(name), "loader", None)
    try:
        if loader is not None and hasattr(loader, "get_data"):
            return bytes(loader.get_data(file))
        with open(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise InputError(
            f"Expected the code in {file} to be readable: {type(error).__name__}. A "
            "run remembers which code it began with."
        ) from None


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _imported(source: bytes, name: str, file: str) -> Iterator[str]:
    """Yields names of modules that a source may import; not all of them exist."""
    if not file.endswith(".py"):
        return  # an extension: its bytes are all that there is
    locations = getattr(_spec(name), "submodule_search_locations", None)
    package = name if locations is not None else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        for target in _targets(node):
            try:
                yield importlib.util.resolve_name(target, package)
            except ImportError:
                continue  # beyond the top-level package: the import fails as well


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield base
        # What is imported from a package may be a module of it.
        dot = "" if base.endswith(".") else "."
        yield from (f"{base}{dot}{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        function, first = node.func, node.args[0]
        called = getattr(function, "attr", getattr(function, "id", None))
        if called in _IMPORTERS and isinstance(first, ast.Constant):
            yield from [first.value] if isinstance(first.value, str) else []
