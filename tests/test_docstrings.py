"""Docstrings: every public function says what it takes, what it gives and what it refuses."""

import importlib
import inspect
import pkgutil
import re

import pytest

import specav

# By this a function checks its arguments itself.
CHECKS = re.compile(r"\b(shaped|one_of|static_int|static_float)\(|\braise (Type|Value)Error\b")


def public_functions():
    """What `__all__` of the package and its subpackages names, and the functions of the modules named there."""
    for name in ("specav", *(f"specav.{module.name}" for module in pkgutil.iter_modules(specav.__path__))):
        if any(part.startswith("_") for part in name.split(".")):
            continue
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", vars(module)):
            value = getattr(module, attribute)
            own = hasattr(module, "__all__") or getattr(value, "__module__", None) == name
            if inspect.isfunction(value) and own and not attribute.startswith("_"):
                yield f"{value.__module__}.{attribute}", value


FUNCTIONS = dict(public_functions())


def test_the_library_is_walked():
    known = {"specav.features.draft_features", "specav.lossless.certify.certify", "specav.verification.carry_over"}
    assert known <= set(FUNCTIONS)
    assert len(FUNCTIONS) > 80


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_documented(name):
    function = inspect.unwrap(FUNCTIONS[name])
    doc = inspect.getdoc(function)
    assert doc and len(doc) > 20 and "TODO" not in doc
    refers = re.search(r"as (in|of|for)? ?`|\bas there\b|of `\w+`|[Ss]ee `", doc)
    unnamed = [
        parameter
        for parameter in inspect.signature(function).parameters
        if not re.search(rf"\b{re.escape(parameter)}\b", doc)
    ]
    assert not unnamed or refers, unnamed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_refuse_arguments_say_so(name):
    function = inspect.unwrap(FUNCTIONS[name])
    body = inspect.getsource(function).replace(inspect.getdoc(function) or "", "")
    if CHECKS.search(body):
        doc = inspect.getdoc(function)
        assert re.search(r"Raises:|Raises\b|as (in|of|for)? ?`|as there", doc), name
