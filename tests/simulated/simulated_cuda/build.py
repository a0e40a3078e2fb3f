"""Compiles the C++ part once for each torch, and keeps it in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

WRITTEN_FOR = "2.13"
"""The minor version of torch whose places are filled. Others may lack some, or have more."""

_NATIVE = Path(__file__).parent / "native"
# NDEBUG as torch itself: its headers declare some classes with other members otherwise
_FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1"]


class Unavailable(RuntimeError):
    """The simulated device cannot be had here; the message says why."""


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("torch is not installed")
    return Path(spec.origin).parent


def check() -> None:
    """Check what the device needs.

    Raises:
        Unavailable: Without a compiler, or with a torch for which the device is not written.
    """
    version = importlib.metadata.version("torch")
    if not version.startswith(WRITTEN_FOR + "."):
        raise Unavailable(f"the simulated device is written for torch {WRITTEN_FOR}, not {version}")
    if "+cu" in version or "+rocm" in version:
        raise Unavailable(f"the simulated device fills torch's CPU build, and this is {version}")
    if not (torch_folder() / "include" / "torch" / "library.h").exists():
        raise Unavailable("this torch was installed without its C++ headers")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise Unavailable("Python's C headers are not installed")
    if _compiler() is None:
        raise Unavailable("no C++ compiler was found: install g++, or set CXX")


def library() -> Path:
    """Return the compiled library; compile it if this torch has none yet, in about 30 s.

    Raises:
        Unavailable: If it cannot be compiled.
    """
    check()
    path = _cache() / f"simulated_{_key()}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several tests may start at once
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    sources = sorted(_NATIVE.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        compiles = [
            _start([*_FLAGS, *_includes(), "-c", str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        for compile_ in compiles:
            _finish(compile_)
        library_folder = torch_folder() / "lib"
        made = Path(folder) / "simulated.so"
        links = [f"-L{library_folder}", "-lc10", "-ltorch_cpu", "-ltorch"]
        _finish(_start(["-shared", "-o", str(made), *map(str, objects), *links]))
        os.replace(made, path)  # whole, or not there


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _includes() -> list[str]:
    include = torch_folder() / "include"
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [part for folder in folders for part in ("-isystem", str(folder))]


def _start(arguments: list[str]) -> subprocess.Popen[str]:
    compiler = _compiler()
    assert compiler is not None
    return subprocess.Popen([compiler, *arguments], stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    said = process.communicate()[1]
    if process.returncode != 0:
        raise Unavailable(f"the simulated device does not compile: {said[-2000:]}")


def _key() -> str:
    """Return a digest of all that the library depends on."""
    parts = [importlib.metadata.version("torch"), sysconfig.get_python_version(), *_FLAGS]
    content = "\n".join(parts).encode()
    content += b"".join(path.read_bytes() for path in sorted(_NATIVE.iterdir()))
    return hashlib.sha256(content).hexdigest()[:16]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-cephalo-tests"
