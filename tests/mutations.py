"""Machinery of the mutation test: the package with one line changed, in memory.

`library(mutation)` imports a second, private copy of the package in which one line of one module is another one, and
leaves the real package as it was. Files are only read. Everything that a module imports from the package, at import
time or later, comes from the same copy, so that a fault planted in one module reaches all its users.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import pathlib
import sys
import types
from typing import NamedTuple

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent / "specav"


class Mutation(NamedTuple):
    """A fault in one line.

    Attributes:
      name: what is wrong.
      module: within the package, e.g. "verification" or "policies.trimming".
      old: a piece of one line, which must occur exactly once in the module.
      new: what stands there instead.
      killed_by: name of the kill function that must fail.
    """

    name: str
    module: str
    old: str
    new: str
    killed_by: str


def mutated_source(mutation):
    """The module's source with the line changed.

    Raises:
      LookupError: the table does not fit the code any more.
    """
    path = ROOT.joinpath(*mutation.module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    if "\n" in mutation.old + mutation.new or mutation.old == mutation.new:
        raise LookupError(f"{mutation.name}: expected two different pieces of one line")
    if source.count(mutation.old) != 1:
        count = source.count(mutation.old)
        raise LookupError(f"{mutation.name}: {mutation.old!r} occurs {count} times in {path.name}, expected once")
    return source.replace(mutation.old, mutation.new)


@functools.cache
def _compiled(path):
    """Code of an unchanged file."""
    return compile(pathlib.Path(path).read_text(encoding="utf-8"), path, "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a module of the private copy."""

    source = None

    def get_code(self, fullname):
        if self.source is None:
            return _compiled(self.path)
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds the modules of the package and puts the mutated source in place."""

    def __init__(self, mutation):
        self.target = None if mutation is None else f"specav.{mutation.module}"
        self.source = None if mutation is None else mutated_source(mutation)
        self.applied = False

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("specav."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return spec
        spec.loader = _Loader(fullname, spec.origin)
        if fullname == self.target:
            spec.loader.source, self.applied = self.source, True
        return spec


class Library:
    """Modules of the private copy as attributes, imported when first used."""

    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return importlib.import_module(f"specav.{name}")

    @property
    def has_the_fault(self):
        """Whether the mutated module was imported: a kill that never loads it says nothing."""
        return self._finder.applied


@contextlib.contextmanager
def library(mutation=None):
    """A private copy of the package, mutated or not; the real one is back in place afterwards."""
    finder = _Finder(mutation)
    package = types.ModuleType("specav")  # without its __init__, which would import everything
    package.__path__ = [str(ROOT)]
    real = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "specav"}
    for name in real:
        del sys.modules[name]
    sys.modules["specav"] = package
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield Library(finder)
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] == "specav"]:
            del sys.modules[name]
        sys.modules.update(real)


class Vectorised:
    """The module jax for a module under test, whose vmap leaves functions alone that take whole batches.

    It lets a test put its own noise in place of draws that the library makes one key at a time, and see what each is
    asked to draw from.
    """

    def __init__(self, *functions):
        self._functions = functions

    def __getattr__(self, name):
        return getattr(jax, name)

    def vmap(self, function, *args, **kwargs):
        return function if function in self._functions else jax.vmap(function, *args, **kwargs)
