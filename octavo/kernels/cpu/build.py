"""Builds the C kernels into a shared library, once per machine, compiler and version of the sources.

``python -m octavo.kernels.cpu.build`` builds ahead of the first use (an installation step). Environment:
``CC`` names the compiler; ``OCTAVO_CPU_FLAGS`` replaces ``-march=native``; ``OCTAVO_CACHE_DIR``, or else
``XDG_CACHE_HOME``, moves the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent

# -ffp-contract=off: a multiplication and an addition are fused only where the source says so, hence equally in every unrolled
# variant of a loop. No -ffast-math: infinities mask scores, and NaN must stay visible.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")

# The first that the compiler takes is used: GCC and clang on x86-64, clang on ARM64, anything else.
MACHINE_FLAGS = ("-march=native", "-mcpu=native", "")


class BuildError(Exception):
    """The kernels can't be built here; the message says why and what would help."""


def find_compiler() -> list[str]:
    """The command line of a C compiler: ``$CC``, cc, gcc, clang, or the one in the ``ziglang`` wheel. BuildError without any."""
    named = os.environ.get("CC", "").strip()
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise BuildError(f"CC={named} is not an executable. Correct or unset CC.")
        return command
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise BuildError("There is no C compiler. Install gcc or clang, or run: pip install ziglang")


def source_files() -> list[Path]:
    return sorted(p for p in SOURCES.iterdir() if p.suffix in (".c", ".h"))


def cache_folder() -> Path:
    """The private folder that holds built libraries, made if it is missing.

    What lies there is loaded into the process, so a folder that others own or may write to is refused (BuildError).
    """
    own = os.environ.get("OCTAVO_CACHE_DIR", "").strip()
    base = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(os.path.abspath(os.path.expanduser(own) if own else os.path.join(base, "octavo"))) / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if hasattr(os, "getuid") and (info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022):
        raise BuildError(f"{folder} belongs to or can be written by another user. Make it private (chmod 700), or set OCTAVO_CACHE_DIR.")
    return folder


def cpu_identity() -> str:
    """What ``-march=native`` depends on: model and feature flags of the first processor."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().split("\n\n", 1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].strip(" :") in names)


def _compiler_identity(compiler: list[str]) -> str:
    """Changes when the compiler does, without running it: start-up should not wait for that."""
    if compiler[:2] == [sys.executable, "-m"]:
        from importlib.metadata import version

        return f"ziglang {version('ziglang')}"
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    info = os.stat(path)
    return f"{shlex.join(compiler)} {path} {info.st_size} {info.st_mtime_ns}"


def library_name(compiler: list[str]) -> str:
    """File name that changes with everything that the built code depends on."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    facts = (
        *FLAGS,
        *MACHINE_FLAGS,
        os.environ.get("OCTAVO_CPU_FLAGS", ""),
        _compiler_identity(compiler),
        cpu_identity(),
        platform.platform(),
    )
    digest.update("\0".join(facts).encode())
    return f"cpu-{digest.hexdigest()[:24]}.so"


def build() -> Path:
    """Path of the built library, built now if need be. Raises BuildError.

    Safe when several processes start at once: each compiles to a name of its own and renames it into place.
    """
    compiler = find_compiler()
    try:
        folder = cache_folder()
    except OSError as error:
        raise BuildError(f"The cache folder can't be made ({error}). Set OCTAVO_CACHE_DIR to one that can be written.") from error
    target = folder / library_name(compiler)
    if target.exists():
        return target
    try:
        handle, name = tempfile.mkstemp(prefix=".build-", suffix=".so", dir=folder)
    except OSError as error:
        raise BuildError(f"{folder} can't be written ({error}). Set OCTAVO_CACHE_DIR to a folder that can.") from error
    os.close(handle)
    try:
        compile_library(compiler, Path(name))
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def compile_library(compiler: list[str], output: Path) -> None:
    """Compile all sources into ``output`` with the best machine flags that the compiler takes. Raises BuildError."""
    sources = [str(p) for p in source_files() if p.suffix == ".c"]
    own = os.environ.get("OCTAVO_CPU_FLAGS")
    message = ""
    for machine in MACHINE_FLAGS if own is None else (own,):
        command = [*compiler, *FLAGS, *shlex.split(machine), *sources, "-o", str(output), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{shlex.join(compiler)} did not run: {error}") from error
        if done.returncode == 0:
            return
        message = message or done.stderr.strip()  # the first try's, which was the one that should have worked
    raise BuildError(f"{shlex.join(compiler)} failed:\n" + "\n".join(message.splitlines()[:12]))


def status() -> str:
    """One line for people: which library is used, or why there is none. Builds nothing."""
    try:
        target = cache_folder() / library_name(find_compiler())
    except (BuildError, OSError) as error:
        return f"no: {error}"
    return f"yes: {target}" if target.exists() else "not yet (built at first use, or by python -m octavo.kernels.cpu.build)"


def main() -> int:
    try:
        print(f"CPU kernels: {build()}")
    except BuildError as error:
        print(f"The CPU kernels were not built; slower torch code will run instead. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
