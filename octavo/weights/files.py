"""Which weight files a model folder holds. Looks at names only; never opens a tensor, never imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from octavo.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.safetensors|\.gguf)$")


def safetensors_files(folder: str | Path) -> list[Path]:
    """The files that together make the model, in name order; [] when the folder has none.

    The index decides when there is one; then ``model.safetensors``; then every ``*.safetensors`` (Mistral's
    ``consolidated*`` copies, which use other tensor names, and adapters are not the model).

    Raises:
        ModelError: a shard is missing (named), or the index cannot be read.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(read_index(index).values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        found = sorted(p.name for p in folder.glob("*.safetensors"))
        names = complete_shards([name for name in found if not name.startswith(("consolidated", "adapter"))])
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(names)} weight shards are missing: {', '.join(missing)}. Copy or download the model again."
        )
    return [folder / name for name in names]


def read_index(index: Path) -> dict[str, str]:
    """The index's weight map: tensor name → file name (checked to be plain names inside the folder)."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a usable safetensors index ({type(error).__name__}: {error}).") from error
    bad = sorted(str(name) for name in names if not isinstance(name, str) or not name or Path(name).name != name)
    if bad:
        raise ModelError(f"{index}: 'weight_map' names files outside of the folder: {', '.join(bad)}.")
    return weight_map


def gguf_files(folder: str | Path) -> list[Path]:
    """The GGUF models of a folder, in name order: single files, and the first file of every split one."""
    return [Path(folder) / name for name in gguf_models(p.name for p in Path(folder).glob("*.gguf"))]


def gguf_models(names: Iterable[str]) -> list[str]:
    """Of GGUF file names, those that open a model: not later shards of a split file, not vision projectors (mmproj)."""
    firsts = []
    for name in sorted(names):
        shard = _SHARD.match(name)
        if (shard is None or int(shard["number"]) == 1) and not name.rsplit("/", 1)[-1].startswith("mmproj"):
            firsts.append(name)
    return firsts


def gguf_shards(path: str | Path) -> list[Path]:
    """All files of the GGUF model that ``path`` is a part of, the first one first."""
    path = Path(path)
    return [path.parent / name for name in complete_shards([path.name])]


def complete_shards(names: list[str]) -> list[str]:
    """Add the shards that the names themselves promise: ``x-00002-of-00003`` implies numbers 1 and 3."""
    complete: set[str] = set()
    for name in names:
        shard = _SHARD.match(name)
        if shard is None:
            complete.add(name)
            continue
        total = int(shard["total"])
        complete.update(f"{shard['stem']}-{number:05}-of-{total:05}{shard['suffix']}" for number in range(1, total + 1))
    return sorted(complete)


def describe_folder(folder: str | Path, limit: int = 8) -> str:
    """``it holds a.txt, b.bin and 3 more`` for error messages."""
    names = sorted(p.name for p in Path(folder).iterdir())
    if not names:
        return "it is empty"
    shown = ", ".join(names[:limit])
    return f"it holds {shown}" + (f" and {len(names) - limit} more" if len(names) > limit else "")


def find_weights(folder: str | Path, load_format: str = "auto") -> tuple[str, str]:
    """(path, format) of a folder's weights: the folder itself and ``safetensors``, or its GGUF file and ``gguf``.

    Raises:
        ModelError: nothing usable (says what is there), or several GGUF models to choose from.
    """
    folder = Path(folder)
    if load_format in ("auto", "safetensors") and safetensors_files(folder):
        return str(folder), "safetensors"
    if load_format in ("auto", "gguf"):
        models = gguf_files(folder)
        if len(models) == 1:
            return str(models[0]), "gguf"
        if models:
            raise ModelError(f"{folder} holds several GGUF models; pass the path of one: {', '.join(str(m) for m in models)}.")
    wanted = {"safetensors": "*.safetensors", "gguf": "*.gguf"}.get(load_format, "*.safetensors or *.gguf")
    raise ModelError(f"{folder} has no weights ({wanted}): {describe_folder(folder)}.{_other_weights_hint(folder)}")


def _other_weights_hint(folder: Path) -> str:
    names = [p.name for p in folder.iterdir()]
    if any(name.startswith("adapter") for name in names):
        return " This is an adapter (LoRA), not a model: pass the base model, or merge the adapter into it."
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return " Pickled PyTorch weights are not read, because they can run code; convert them to safetensors first."
    if any(name.startswith("consolidated") for name in names):
        return " Mistral's consolidated files use other tensor names; get the repository's model*.safetensors."
    return ""


def stored_dtype(folder: str | Path) -> str | None:
    """Type of the first two-dimensional floating-point tensor, such as ``bfloat16``, read from a file's header alone."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    files = safetensors_files(folder)
    if not files:
        return None
    try:
        with open(files[0], "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        return next((names[e["dtype"]] for e in entries if len(e["shape"]) == 2 and e["dtype"] in names), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return None  # a corrupt file is reported, with its name, when its tensors are read
