"""Makes ``Trainer(strategy="cephalo")`` known to Lightning without an import in the user's script.

``Trainer`` looks up the name of its strategy before it reads any of Lightning's entry points. Only
torch has a hook that is early enough: the entry point group ``torch.backends``, called at the end
of ``import torch``, usually before Lightning's. So an import finder waits for Lightning's registry.

This module must never break or slow down ``import torch``: it imports the standard library only,
and turns every failure into a debug message.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_logger = logging.getLogger(__name__)

# name -> start method, as in Lightning's own "ddp" family; a notebook can only fork, because it
# cannot re-run a script and its functions cannot be pickled
_START_METHODS = {
    "cephalo": "popen",
    "cephalo_spawn": "spawn",
    "cephalo_fork": "fork",
    "cephalo_notebook": "fork",
}


def register() -> None:
    """Register the names ``cephalo*`` now, or as soon as Lightning is imported.

    Safe to call any number of times and at any moment; raises nothing. Registers with both
    ``lightning.pytorch`` and the separate package ``pytorch_lightning``. In the latter, the names
    lead to an error that names the right import.
    """
    for module_name, factory in _FACTORIES.items():
        try:
            module = sys.modules.get(module_name)
            if module is not None:
                _add_names(module, factory)
            elif not any(_waits_for(finder, module_name) for finder in sys.meta_path):
                sys.meta_path.insert(0, _RegisterAfterImport(module_name, factory))
        except Exception:
            _logger.debug("could not register with %s", module_name, exc_info=True)


def _create_strategy(**options: Any) -> Any:
    """Return a ``CephaloStrategy``; imports it only now, when a Trainer needs it."""
    from lightning_cephalo.strategy import CephaloStrategy

    return CephaloStrategy(**options)


def _refuse_other_package(**options: Any) -> Any:
    """Raise RuntimeError: the two packages' classes fail each other's isinstance checks."""
    raise RuntimeError(
        'strategy="cephalo" works with the package `lightning`, but this Trainer comes from '
        "`pytorch_lightning`. The two have separate classes that cannot be mixed: replace "
        "`import pytorch_lightning as pl` with `import lightning.pytorch as pl`, everywhere in the "
        "script."
    )


_FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _create_strategy,
    "pytorch_lightning.strategies": _refuse_other_package,
}


def _add_names(module: ModuleType, factory: Callable[..., Any]) -> None:
    registry = module.StrategyRegistry
    for name, start_method in _START_METHODS.items():
        # an existing name is ours from an earlier call, or the user's replacement: both stay
        if name not in registry:
            registry.register(
                name,
                factory,
                description=f"Uneven batches and shards, `start_method` {start_method!r}",
                start_method=start_method,
            )


def _waits_for(finder: object, module_name: str) -> bool:
    return isinstance(finder, _RegisterAfterImport) and finder.module_name == module_name


class _RegisterAfterImport:
    """An import finder that finds nothing itself, but registers after one module was executed.

    It stays in ``sys.meta_path`` until then, and costs every other import one comparison of
    strings.
    """

    def __init__(self, module_name: str, factory: Callable[..., Any]) -> None:
        self.module_name = module_name
        self._factory = factory
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # a similar hook of another package calls all finders too: the flag prevents an endless loop
        if name != self.module_name or self._searching:
            return None
        self._searching = True
        try:
            spec = self._find_with_others(name, path, target)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            try:
                self._register_after(spec.loader)
            except Exception:
                _logger.debug("could not watch the import of %s", name, exc_info=True)
        return spec

    def _find_with_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _register_after(self, loader: Any) -> None:
        # Replaces the method of this one loader for one call instead of wrapping the loader:
        # inspect, linecache and importlib.resources look at the type of a module's loader.
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            try:
                _add_names(module, self._factory)
                sys.meta_path.remove(self)
            except Exception:
                _logger.debug("could not register with %s", module.__name__, exc_info=True)

        loader.exec_module = exec_module
