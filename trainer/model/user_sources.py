"""The files of the user's code that a run depends on.

Formal guarantees:
  - ``digests`` covers the given modules and everything they import, at any depth: at
    their top or within a function, absolute or relative, by a statement or by
    ``import_module`` of a literal name.  It reads the source and runs none of it.
  - It omits the standard library, installed packages and this project, which
    ``origin`` covers by their versions.
  - ``check_function`` refuses a module that does not exist, and one whose source does
    not parse or does not contain the name; it imports nothing.
  - ``changed`` names every file of ``digests`` whose bytes changed, or that is gone.

Imports under a computed name and files that code reads are not covered;
``graph_digest`` covers their effect on the step.

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

from accounting.core.validation import InputError
from trainer.core.run.withheld import is_users_file
from trainer.model.user_code import (
    check_name,
    import_from_here,
    one_line_errors,
    remedy_of,
)

#: Names that let a module define names that its source does not contain.
_BINDS_UNSEEN = {"*", "__getattr__", "exec", "globals", "setattr", "vars"}
_IMPORTERS = ("import_module", "__import__")


def named_in(settings: Any) -> dict[str, str]:
    """Returns the functions that settings name: name of the setting -> its text.

    Args:
      settings: `TrainSettings`.
    """
    options = ("model", "augment", "loss", "metric", "optimizer", "aggregate")
    found = {option: getattr(settings, option) for option in options}
    return {option: spec for option, spec in found.items() if spec and ":" in spec}


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of each module of the user, and of those they import.

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
    """Returns the modules of ``recorded`` whose files changed or are gone."""
    import_from_here()
    return [name for name, digest in recorded.items() if _digest(name) != digest]


def edited_files(recorded: Mapping[str, str]) -> list[str]:
    """Returns the files of the modules of ``recorded`` that changed or are gone."""
    return [file_of(name) or name for name in changed(recorded)]


def _digest(name: str) -> str | None:
    file = file_of(name)
    try:
        return file and hashlib.sha256(_read(name, file)).hexdigest()
    except InputError:
        return None


def check_function(spec: str, option: str) -> None:
    """Refuses ``module:function`` if the module's source does not contain the name.

    Reads the source and runs none of it, so that a wrong name is found before
    TensorFlow loads; ``load_function`` checks the rest.

    Args:
      spec: "module:function", as the user wrote it.
      option: Name of the flag.

    Raises:
      InputError: there is no such module, it is not Python, or it lacks the name.
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
    """Returns all names that a source binds, uses or imports."""
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
    """Does what ``importlib.util.find_spec`` does, without importing the parents."""
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
    """Returns the spec of a namespace package, a folder without ``__init__.py``."""
    folders = [os.path.join(each, name.rpartition(".")[2]) for each in path or ()]
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(filter(os.path.isdir, folders))
    return spec


def _read(name: str, file: str) -> bytes:
    # The loader also reads files in archives.
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
        return  # an extension module has no source
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
        # A name imported from a package may be a module.
        dot = "" if base.endswith(".") else "."
        yield from (f"{base}{dot}{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        function, first = node.func, node.args[0]
        called = getattr(function, "attr", getattr(function, "id", None))
        if called in _IMPORTERS and isinstance(first, ast.Constant):
            yield from [first.value] if isinstance(first.value, str) else []
