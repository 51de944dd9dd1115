"""A kernel's fingerprint: SHA-256 over the syntax of its entry functions and of everything they reach.

Names are followed through imports, functions, classes and constants, without importing or running anything, as far as
the packages of the entries and kvhal itself go. Comments, docstrings and layout of the source are not in it, so only a
change that can matter makes old evidence stale. Of a class its fields and special methods count, and those other
methods whose name is used somewhere on the way. No torch.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvhal.errors import ConfigError

__all__ = ["REFERENCE", "Fingerprint", "fingerprint"]

# What the CPU runs, and every platform that brings no kernels of its own.
REFERENCE = tuple(f"kvhal.kernels.operators._{name}" for name in ("store", "gather", "attend", "copy_blocks"))

_OWN = "kvhal"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Left out: what is derived from the place in the tree, and what only a type checker reads.
_UNSAID = frozenset({"ctx", "type_comment", "kind"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256: hexadecimal. packages: the foreign packages whose code it calls ("torch", "triton"), by import name."""

    sha256: str
    packages: frozenset[str]


@cache
def fingerprint(entries: tuple[str, ...]) -> Fingerprint:
    """The fingerprint of the functions with these dotted names ("package.module.function").

    Raises ConfigError if one is not found, or if a module on the way hides what it takes behind `import *`.
    """
    reach = _Reach(frozenset({_OWN, *(entry.partition(".")[0] for entry in entries)}))
    for entry in entries:
        module, _, name = entry.rpartition(".")
        if not reach.is_module(module) or name not in reach.module(module).bound:
            raise ConfigError(f"kernel entry {entry!r} was asked for and there is no such function; correct its name")
        reach.name(module, name, ())
    reach.settle()
    text = "\n".join(sorted(reach.said.values()))
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest(), frozenset(reach.packages))


@dataclass(slots=True)
class _Module:
    """What the top level of a module binds: definitions by name, and names that are imports (module, name or None)."""

    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class _Class:
    """A class on the way: its methods by name, those not yet reached."""

    module: str
    name: str
    waiting: dict[str, list[ast.stmt]]


@dataclass(slots=True)
class _Reach:
    """A walk from the entries. said: the text of each definition reached. attributes: those used on some object."""

    roots: frozenset[str]
    said: dict[tuple[str, ...], str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    classes: dict[tuple[str, str], _Class] = field(default_factory=dict)
    modules: dict[str, _Module] = field(default_factory=dict)
    files: dict[str, Path | None] = field(default_factory=dict)

    def is_module(self, dotted: str) -> bool:
        if dotted not in self.files:
            self.files[dotted] = _file_of(dotted) if dotted else None
        return self.files[dotted] is not None

    def module(self, dotted: str) -> _Module:
        if dotted not in self.modules:
            file = self.files[dotted]
            assert file is not None
            package = dotted if file.name == "__init__.py" else dotted.rpartition(".")[0]
            self.modules[dotted] = _index(ast.parse(file.read_bytes()), dotted, package)
        return self.modules[dotted]

    def name(self, module: str, name: str, attributes: tuple[str, ...]) -> None:
        """Reach `name.attributes…` as it stands in `module`."""
        found = self.module(module)
        if name in found.imports:
            self.target(*found.imports[name], attributes)
            if name not in found.bound:
                return
        nodes = found.bound.get(name, [])
        if len(nodes) == 1 and isinstance(nodes[0], ast.ClassDef):
            self.of_class(module, nodes[0], attributes)
            return
        self.attributes.update(attributes)
        if nodes and (module, name) not in self.said:
            self.said[module, name] = ""
            self.said[module, name] = self.text(module, (module, name), nodes)

    def target(self, module: str, name: str | None, attributes: tuple[str, ...]) -> None:
        """Reach what an import names: `name` of `module`, a module of its own, or (None) the module itself."""
        top = module.partition(".")[0]
        if top not in self.roots:
            self.packages.add(top)
            self.said["import", f"{module}:{name}"] = f"import {module}:{name}"
            return
        path = (*((name,) if name is not None else ()), *attributes)
        while path and self.is_module(f"{module}.{path[0]}"):
            module, path = f"{module}.{path[0]}", path[1:]
        if not self.is_module(module):
            raise ConfigError(f"module {module!r} is imported by a kernel and its source was not found")
        # A module that is handed around may be asked for anything it holds.
        for each in path[:1] if path else (*self.module(module).bound,):
            self.name(module, each, path[1:])

    def of_class(self, module: str, node: ast.ClassDef, attributes: tuple[str, ...]) -> None:
        key = (module, node.name)
        if key not in self.classes:
            methods: dict[str, list[ast.stmt]] = {}
            rest: list[ast.stmt] = []
            for item in node.body:
                if isinstance(item, _FUNCTIONS) and not item.name.startswith("__"):
                    methods.setdefault(item.name, []).append(item)
                else:
                    rest.append(item)
            self.classes[key] = _Class(module, node.name, methods)
            # A copy has every field that this Python knows; Python 3.12 gave classes one more.
            head = copy.copy(node)
            head.body = rest
            self.said[key] = ""
            self.said[key] = self.text(module, key, [head])
        if not attributes:
            return
        first, *others = attributes
        # A name that the class itself lacks may be inherited.
        if not self.method(self.classes[key], first):
            self.attributes.add(first)
        self.attributes.update(others)

    def method(self, of: _Class, name: str) -> bool:
        """Reach a method; whether the class has, or had, one of that name."""
        key = (of.module, of.name, name)
        if name in of.waiting:
            nodes = of.waiting.pop(name)
            self.said[key] = ""
            self.said[key] = self.text(of.module, key, nodes)
        return key in self.said

    def settle(self) -> None:
        """Reach the methods whose name is used on an object whose class is not known, until there is no new one."""
        while True:
            found = [(c, name) for c in self.classes.values() for name in c.waiting if name in self.attributes]
            if not found:
                return
            for of, name in found:
                self.method(of, name)

    def text(self, module: str, key: tuple[str, ...], nodes: Iterable[ast.stmt]) -> str:
        """The normalised text of definitions; everything they name is reached as well."""
        writer = _Writer()
        for node in nodes:
            writer.node(node)
        package = module if self._is_package(module) else module.rpartition(".")[0]
        local = dict(pair for node in writer.imports for pair in _imports(node, module, package))
        for target in local.values():
            self.target(*target, ())
        known = self.module(module)
        for name, attributes in writer.names:
            if name in local:
                self.target(*local[name], attributes)
            elif name in known.bound or name in known.imports:
                self.name(module, name, attributes)
            else:
                self.attributes.update(attributes)
        self.attributes.update(writer.attributes)
        return ".".join(key) + " " + "".join(writer.parts)

    def _is_package(self, module: str) -> bool:
        file = self.files[module]
        return file is not None and file.name == "__init__.py"


@dataclass(slots=True)
class _Writer:
    """Turns a tree into text, the same under every Python version, and notes what it names.

    names: (name, attributes taken from it). attributes: those taken from any other expression.
    """

    parts: list[str] = field(default_factory=list)
    names: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)

    def node(self, node: ast.AST) -> None:
        write = self.parts.append
        if isinstance(node, (ast.Name, ast.Attribute)) and (chain := _chain(node)):
            self.names.add((chain[0], chain[1:]))
            write(".".join(chain))
            return
        if isinstance(node, ast.Attribute):
            self.attributes.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imports.append(node)
        write(type(node).__name__)
        write("(")
        for name in node._fields:
            value = getattr(node, name)
            # Newer Pythons add fields; an empty one says nothing.
            if value is None or value == [] or name in _UNSAID:
                continue
            write(name)
            write("=")
            if isinstance(value, ast.AST):
                self.node(value)
            elif isinstance(value, list):
                self._list(node, name, value)
            else:
                write(repr(value))
            write(",")
        write(")")

    def _list(self, node: ast.AST, name: str, values: list[object]) -> None:
        skip = name == "body" and isinstance(node, _DEFINITIONS) and _is_docstring(values[0])
        for value in values[1:] if skip else values:
            if isinstance(value, ast.AST):
                self.node(value)
            else:
                self.parts.append(repr(value))
            self.parts.append(";")


def _chain(node: ast.expr) -> tuple[str, ...]:
    """("a", "b", "c") of `a.b.c`; nothing if what stands first is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _index(tree: ast.Module, module: str, package: str) -> _Module:
    found = _Module()
    for node in _statements(tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.imports.update(_imports(node, module, package))
        elif isinstance(node, _DEFINITIONS):
            found.bound.setdefault(node.name, []).append(node)
        else:
            for name in dict.fromkeys(_stored(node)):
                found.bound.setdefault(name, []).append(node)
    return found


def _stored(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds; those of a comprehension are its own."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.comprehension):
            yield from _stored(child)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement of a module's top level, those under if, try and with included."""
    for node in body:
        match node:
            case ast.If() | ast.With():
                yield from _statements([*node.body, *(node.orelse if isinstance(node, ast.If) else ())])
            case ast.Try():
                handlers = [item for handler in node.handlers for item in handler.body]
                yield from _statements([*node.body, *handlers, *node.orelse, *node.finalbody])
            case _:
                yield node


def _imports(
    node: ast.Import | ast.ImportFrom, module: str, package: str
) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """(bound name, (module, name or None)) of an import statement in `module`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.asname, (alias.name, None)) if alias.asname else (top, (top, None))
        return
    source = node.module or ""
    if node.level:
        parents = package.split(".")
        source = ".".join([*parents[: len(parents) - node.level + 1], *((source,) if source else ())])
    for alias in node.names:
        if alias.name == "*":
            raise ConfigError(f"{module} imports * from {source}, which hides what a kernel takes; name the imports")
        yield alias.asname or alias.name, (source, alias.name)


def _file_of(dotted: str) -> Path | None:
    """The source of a module; only its top-level package is looked up, so nothing is imported."""
    top, *inside = dotted.split(".")
    spec = find_spec(top)
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin) if spec.origin and not inside else None
    for folder in spec.submodule_search_locations:
        path = Path(folder).joinpath(*inside)
        for file in (path / "__init__.py", path.with_suffix(".py") if inside else None):
            if file is not None and file.is_file():
                return file
    return None
