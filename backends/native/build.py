"""Compiles the kernels once for this machine and keeps the library in the user's cache. No torch.

A missing compiler is not an error: the engine then runs on torch alone and says so.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from backends.user_cache import alone, user_cache

SOURCES = ("common.h", "attention.h", "matrix.h", "prefill.h", "rows.h", "kernels.c")
BUILD_TIMEOUT_SECONDS = 120

# Not -ffast-math: linked into a library it makes the whole process flush denormals to zero.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", *_MATH, "-shared", "-fPIC", "-w")


class BuildFailed(Exception):
    """Why there are no kernels on this machine."""


def library_path() -> Path:
    """The compiled library, built now if this machine has none yet. Raises BuildFailed."""
    if os.environ.get("KVGATE_NATIVE") == "0":
        raise BuildFailed("switched off by KVGATE_NATIVE=0")
    compiler = _compiler()
    target = user_cache() / "native" / f"kernels-{_key(compiler)}.so"
    if not target.exists():
        with alone(target.parent):  # the instances of a first start all come here: one compiles, the others wait
            if not target.exists():
                _build(compiler, target)
    return target


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildFailed("no C compiler (cc, gcc or clang) was found; install one for several times the decode speed")


def _key(compiler: str) -> str:
    """Changes with the sources, the flags, the compiler and the processor."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    stat = Path(compiler).stat()
    digest.update(repr((_FLAGS, os.path.realpath(compiler), stat.st_size, stat.st_mtime_ns, processor())).encode())
    return digest.hexdigest()[:16]


def processor() -> str:
    """What tells this machine's processor from one that the same kernels may not run on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _build(compiler: str, target: Path) -> None:
    """Compile beside the target, then rename: nobody ever sees half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / "kernels.so"
        errors = ""
        for openmp in (("-fopenmp",), ()):  # without OpenMP (Apple's clang) the kernels use one thread
            command = [compiler, *_FLAGS, *openmp, str(Path(__file__).parent / "kernels.c"), "-o", str(output), "-lm"]
            try:
                run = subprocess.run(
                    command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_SECONDS, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildFailed(f"{compiler} could not compile the kernels: {error}") from error
            if run.returncode == 0:
                output.replace(target)
                return
            errors = run.stderr.strip().splitlines()[0] if run.stderr.strip() else f"exit code {run.returncode}"
        raise BuildFailed(f"{compiler} could not compile the kernels: {errors}")


def main() -> int:
    """`python -m backends.native.build`: compile now, so that the first start doesn't have to."""
    try:
        sys.stderr.write(f"kvgate: compiled kernels in {library_path()}\n")
    except BuildFailed as reason:
        sys.stderr.write(f"kvgate: no compiled kernels, decoding will be several times slower: {reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
