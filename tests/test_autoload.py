"""The names are there without an import, and `import torch` is neither broken nor slowed.

Every case needs a fresh interpreter: what matters is the order of imports.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("cephalo", "cephalo_fork", "cephalo_notebook", "cephalo_spawn")

PRINT_NAMES = """
from lightning.pytorch.strategies import StrategyRegistry as registry
print(*sorted(name for name in registry if name.startswith("cephalo")))
"""

# a module of strategies whose registry refuses every name
RAISES = """
class StrategyRegistry(dict):
    def register(*_, **__): raise ValueError
StrategyRegistry = StrategyRegistry()
"""

COUNT_FINDERS = """
import sys
print(sum(type(finder).__name__ == "_RegisterAfterImport" for finder in sys.meta_path))
"""


def run_python(code: str, folder: Path | None = None, **environment: str) -> str:
    """Run ``code`` in a new interpreter, outside the checkout; return what it printed."""
    variables = {**os.environ, **environment}
    if folder is not None:
        variables["PYTHONPATH"] = str(folder)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        cwd=folder or Path(sys.prefix),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a tiny ``lightning`` that has only the registry: quick to import."""
    package = tmp_path / "lightning" / "pytorch"
    package.mkdir(parents=True)
    (tmp_path / "lightning" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, strategy, description, **options):\n"
        "        assert name not in self\n"
        "        self[name] = (strategy, options)\n"
        "StrategyRegistry = Registry()\n"
    )
    return tmp_path


@pytest.mark.slow
def test_trainers_of_both_packages_know_the_names_without_an_import_of_this_one() -> None:
    """The names of ``lightning.pytorch`` lead to the strategy, the other package's to an error."""
    printed = run_python(
        "from pytorch_lightning.strategies import StrategyRegistry as others\n"
        + PRINT_NAMES
        + "try:\n"
        "    others.get('cephalo')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "import sys\n"
        "from lightning.pytorch.strategies import SingleDeviceStrategy\n"
        "class Stub(SingleDeviceStrategy):\n"
        "    def __init__(self, start_method):\n"
        "        super().__init__()\n"
        "        print('made with', start_method)\n"
        "import types\n"
        "module = types.ModuleType('lightning_cephalo.strategy')\n"
        "module.CephaloStrategy = Stub\n"
        "assert module.__name__ not in sys.modules\n"
        "sys.modules[module.__name__] = module\n"
        "from lightning.pytorch import Trainer\n"
        "options = dict(logger=False, enable_checkpointing=False, accelerator='cpu')\n"
        "trainer = Trainer(strategy='cephalo', enable_progress_bar=False, **options)\n"
        "print(type(trainer.strategy).__name__)\n"
    )
    names, error, resolved = printed.split("\n", 2)
    assert names == " ".join(NAMES)
    assert "import lightning.pytorch as pl" in error
    assert "made with popen\nStub" in resolved


def test_the_registry_knows_the_names_when_the_package_is_imported_first(stand_in: Path) -> None:
    assert run_python("import lightning_cephalo" + PRINT_NAMES, stand_in) == " ".join(NAMES)


def test_plain_import_registers_when_torch_does_not_call_its_entry_points(stand_in: Path) -> None:
    disabled = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run_python("import torch" + PRINT_NAMES, stand_in, **disabled) == ""
    own = "import lightning_cephalo" + PRINT_NAMES
    assert run_python(own, stand_in, **disabled) == " ".join(NAMES)
    late = "import lightning.pytorch.strategies\nimport lightning_cephalo"
    assert run_python(late + PRINT_NAMES, stand_in, **disabled) == " ".join(NAMES)


def test_each_name_has_the_start_method_of_its_ddp_sibling(stand_in: Path) -> None:
    printed = run_python(
        "import lightning_cephalo\n"
        "from lightning.pytorch.strategies import StrategyRegistry as registry\n"
        "print({name: options['start_method'] for name, (_, options) in registry.items()})",
        stand_in,
    )
    assert printed == str(
        {
            "cephalo": "popen",
            "cephalo_spawn": "spawn",
            "cephalo_fork": "fork",
            "cephalo_notebook": "fork",
        }
    )


def test_registering_again_changes_nothing(stand_in: Path) -> None:
    again = "from lightning_cephalo._autoload import register\nregister()\nregister()\n"
    assert run_python(again + COUNT_FINDERS, stand_in) == "2"
    assert run_python(again + PRINT_NAMES + again + COUNT_FINDERS, stand_in) == (
        " ".join(NAMES) + "\n1"
    )


def test_the_module_keeps_its_own_loader(stand_in: Path) -> None:
    assert run_python(
        "import lightning_cephalo, inspect\n"
        "import lightning.pytorch.strategies as module\n"
        "print(type(module.__loader__).__name__, 'class Registry' in inspect.getsource(module))",
        stand_in,
    ) == ("SourceFileLoader True")


def test_a_failed_import_of_lightning_can_be_repeated(stand_in: Path) -> None:
    module = stand_in / "lightning" / "pytorch" / "strategies.py"
    source = module.read_text()
    module.write_text("raise ImportError('half installed')\n")
    printed = run_python(
        "import lightning_cephalo, pathlib\n"
        "try:\n"
        "    import lightning.pytorch.strategies\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        f"pathlib.Path({str(module)!r}).write_text({source + '# longer'!r})\n" + PRINT_NAMES,
        stand_in,
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert printed == "half installed\n" + " ".join(NAMES)


def test_two_hooks_of_this_kind_do_not_ask_each_other_forever(stand_in: Path) -> None:
    assert run_python(
        "import sys, lightning_cephalo\n"
        "class Other:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        for finder in sys.meta_path:\n"
        "            if finder is not self and name == 'lightning.pytorch.strategies':\n"
        "                spec = finder.find_spec(name, path, target)\n"
        "                if spec is not None:\n"
        "                    return spec\n"
        "sys.meta_path.insert(0, Other())" + PRINT_NAMES,
        stand_in,
    ) == " ".join(NAMES)


@pytest.mark.parametrize(
    "registry",
    [
        "",
        "StrategyRegistry = None",
        RAISES,
    ],
    ids=["missing", "none", "raises"],
)
def test_an_unknown_lightning_breaks_neither_this_package_nor_itself(
    stand_in: Path, registry: str
) -> None:
    (stand_in / "lightning" / "pytorch" / "strategies.py").write_text(registry)
    lightning, own = "import lightning.pytorch.strategies\n", "import lightning_cephalo\n"
    for both in (lightning + own, own + lightning):
        assert run_python(both + "print('fine')", stand_in) == "fine"


def test_an_unknown_lightning_that_is_there_first_does_not_break_torch(stand_in: Path) -> None:
    """Torch passes on what its entry points raise."""
    (stand_in / "lightning" / "pytorch" / "strategies.py").write_text(RAISES)
    both = "import lightning.pytorch.strategies\nimport torch, sys\n"
    said = "print('lightning_cephalo' in sys.modules)"
    assert run_python(both + said, stand_in) == "True"


def test_torch_imports_without_lightning_which_may_come_later(stand_in: Path) -> None:
    missing = stand_in / "missing"
    missing.mkdir()
    (missing / "lightning.py").write_text("raise ImportError('not installed')\n")
    printed = run_python(
        f"import sys\nsys.path.insert(0, {str(missing)!r})\n"
        "import torch\n"
        "print('lightning' in sys.modules, 'lightning_cephalo' in sys.modules)\n"
        "try:\n"
        "    import lightning.pytorch\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        f"sys.path.remove({str(missing)!r})" + PRINT_NAMES,
        stand_in,
    )
    assert printed == "False True\nnot installed\n" + " ".join(NAMES)


def test_the_shim_imports_nothing_but_the_standard_library() -> None:
    outside = run_python(
        "import sys\n"
        "known = set(sys.modules)\n"
        "import lightning_cephalo\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - known}\n"
        "print(*sorted(new - sys.stdlib_module_names - {'lightning_cephalo'}))"
    )
    assert outside == ""


def test_the_shim_imports_next_to_nothing() -> None:
    """What it costs every `import torch` is what it imports: a few milliseconds."""
    added = run_python(
        "import sys\n"
        "known = set(sys.modules)\n"
        "import lightning_cephalo\n"
        "print(*sorted(set(sys.modules) - known))"
    ).split()
    own = [name for name in added if name.startswith("lightning_cephalo")]
    assert own == ["lightning_cephalo", "lightning_cephalo._autoload"]
    # the others are what `logging` brings along, which torch has imported by then
    assert len(added) < 40


def test_public_names_that_do_not_exist_are_attribute_errors() -> None:
    import lightning_cephalo

    assert not hasattr(lightning_cephalo, "Cephalo")
    assert set(lightning_cephalo.__all__) <= set(dir(lightning_cephalo))
