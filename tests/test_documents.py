"""Comments, docstrings and pages cite only what is in the repository."""

from __future__ import annotations

import ast
import io
import re
import runpy
import shlex
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lightning_cephalo import run
from lightning_cephalo.offline import cli

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cephalo"
CODE = sorted(
    path
    for folder in ("lightning_cephalo", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FILES = {str(path.relative_to(ROOT)) for path in CODE}

# spelt so that this file does not cite them itself
ELSEWHERE = re.compile(
    r"DES" r"IGN\b|runtime no" r"tes|\(refer" r"ence|refer" r"ence[/:]|this proj" r"ect's"
)
NOTE = re.compile(r"\[Note: ([^\]]+)\]( in (?::mod:`~?([\w.]+)`|`*([\w/]+\.py)))?")
PYTHON_FILE = re.compile(r"[\w/]+\.py\b")
DOCUMENT = re.compile(r"docs/[\w/.-]*\w")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OBJECT = re.compile(r"`~?(lightning_cephalo(?:\.\w+)+)`")
# files of others that comments name
FOREIGN = ("torch/", "split_workload.py")
# set on objects of others
OWN_ATTRIBUTES = {"_cephalo_borrowed", "_dealing", "_leaf_of_unit", "_length"}
# of named tuples and of ``os``
DOCUMENTED_NAMES = {"_exit", "_fields", "_make", "_replace"}


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _said(source: str) -> Iterator[str]:
    """Every comment block and every docstring of a Python file, each as one line."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] > last + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("#! "))
            last = token.start[0]
    yield " ".join(block)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())


@cache
def _exists(name: str) -> bool:
    return (ROOT / name).exists()


@cache
def said(path: Path) -> tuple[str, ...]:
    """What a page, or the comments and docstrings of a file, say."""
    text = path.read_text()
    return tuple(_said(text)) if path.suffix == ".py" else (" ".join(text.split()),)


@cache
def names_of_tests() -> frozenset[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text())}
    return frozenset(found)


def is_file(name: str) -> bool:
    """Whether a path, or its end, is that of a Python file here."""
    return any(path == name or path.endswith("/" + name) for path in FILES)


@cache
def is_object(name: str) -> bool:
    """Whether a dotted name is a module here, or something that a module here defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:length])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                text = path.read_text()
                return all(re.search(rf"\b{part}\b", text) for part in parts[length:])
    return False


def test_what_is_cited_is_in_the_repository():
    faults = []
    for path in (*CODE, *PAGES):
        for text in said(path):
            faults += [f"{_id(path)}: {cited}" for cited in ELSEWHERE.findall(text)]
            faults += [
                f"{_id(path)}: {cited}" for cited in DOCUMENT.findall(text) if not _exists(cited)
            ]
            faults += [
                f"{_id(path)}: [Note: {title}]{place}"
                for title, place, module, file in NOTE.findall(text)
                if place and f"[Note: {title}]" not in _source(module or file)
            ]
            faults += [
                f"{_id(path)}: {name}" for name in OBJECT.findall(text) if not is_object(name)
            ]
    assert not faults


@cache
def _source(place: str) -> str:
    """Text of a module, or of the one file whose path ends like this."""
    ending = place if place.endswith(".py") else place.replace(".", "/") + ".py"
    (path,) = [file for file in FILES if file == ending or file.endswith("/" + ending)]
    return (ROOT / path).read_text()


def test_comments_name_files_that_exist():
    faults = [
        f"{_id(path)}: {name}"
        for path in CODE
        for text in said(path)
        for name in PYTHON_FILE.findall(text)
        if not is_file(name) and not name.startswith(FOREIGN)
    ]
    assert not faults


def test_links_of_pages_lead_somewhere():
    faults = []
    for path in PAGES:
        for target in LINK.findall(path.read_text()):
            file, _, heading = target.partition("#")
            linked = path.parent / file if file else path
            if target.startswith("http") or (
                linked.exists() and (not heading or heading in _headings(linked.read_text()))
            ):
                continue
            faults.append(f"{_id(path)}: {target}")
    assert not faults


def test_pages_name_files_and_tests_that_exist():
    faults = []
    for path in PAGES:
        for name in re.findall(r"`([\w/.-]+)`", path.read_text()):
            if name.startswith("test_") and "/" not in name:
                exists = name in names_of_tests()
            elif name.endswith(".py"):
                exists = is_file(name)
            elif name.endswith("/"):
                exists = any((folder / name).is_dir() for folder in (ROOT, PACKAGE))
            else:
                continue
            if not exists:
                faults.append(f"{_id(path)}: {name}")
    assert not faults


def commands() -> Iterator[tuple[str, list[str]]]:
    """The page and the words of every command in a block of the pages."""
    for path in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield _id(path), words


def test_commands_of_pages_have_the_arguments_of_the_programs(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    programs = Counter[str]()
    for page, words in commands():
        match words:
            case ["cephalo", *arguments]:
                cli._parser().parse_args(arguments)
            case ["python", "-m", "lightning_cephalo.run", *arguments]:
                run.parse(arguments)
            case ["python", script, *_]:
                assert is_file(script), page
            case ["make", target]:
                assert f"\n{target}:" in (ROOT / "Makefile").read_text(), page
            case _:
                continue
        programs[words[0]] += 1
    assert programs.keys() == {"cephalo", "make", "python"}


def test_the_page_shows_the_programs_that_the_command_prints(capsys):
    page = (ROOT / "docs" / "architecture.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    (shown,) = (block for block in blocks if block.startswith("rank 0\n"))
    runpy.run_module("lightning_cephalo.plan", run_name="__main__")
    assert shown == capsys.readouterr().out


def _headings(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def _private_names(path: Path) -> set[str]:
    """Names with one underscore that a file takes from modules and objects of others."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(PACKAGE.name):
            found |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
    return {name for name in found if re.match(r"_[^_]", name)}


def _own_names(path: Path) -> set[str]:
    """Private names that a file defines, or sets on objects of its own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in ast.walk(ast.Tuple(elts=list(targets))):
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
    return found


def test_every_private_name_of_torch_and_lightning_is_listed_with_its_reason():
    package = [path for path in CODE if PACKAGE in path.parents]
    own = set().union(*map(_own_names, package))
    page = (ROOT / "docs/design/lightning.md").read_text()
    listed = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    known = own | listed | OWN_ATTRIBUTES | DOCUMENTED_NAMES
    missing = {f"{name} ({_id(path)})" for path in package for name in _private_names(path) - known}
    assert not missing, "list them in docs/design/lightning.md, with reason and test"


def test_the_walk_reads_comments_and_docstrings_and_nothing_else():
    source = (
        '"""A page: docs/none.md."""\nx = "docs/text.md"  # of two\n# lines: [Note: b] in c.py\n'
    )
    comments, docstring = _said(source)
    assert comments == "of two lines: [Note: b] in c.py" and docstring == "A page: docs/none.md."
    assert NOTE.findall(comments) == [("b", " in c.py", "", "c.py")]
    assert is_object("lightning_cephalo.plan.cost.predict") and not is_object("lightning_cephalo.x")
    assert is_file("plan/cost.py") and not is_file("cost_.py")
