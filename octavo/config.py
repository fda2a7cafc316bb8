"""Configuration: frozen dataclasses whose fields are also the command line's flags and ``LLM``'s keyword arguments.

One field = one flag = one keyword argument (``max_model_len`` ↔ ``--max-model-len``). Metadata: ``help`` is the flag's
help text; ``choices``; ``short``; ``aliases`` (other spellings); ``repeat`` (a tuple field whose flag may be given several
times, and with ``nargs="+"`` takes several values at once); ``metavar``; ``parse="bytes"`` (a size; text with a suffix will do); ``auto``
(the word auto may be written for None).
Imports nothing heavy: ``octavo --help`` reads these.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError
from octavo.hints import explain

FEW_ROWS, MANY_ROWS = 256, 1024  # what --max-num-seqs auto takes
# Attention backend -> the devices it runs on.
ATTENTION_DEVICES = {"cpu": ("cpu",), "triton": ("cuda",), "flash": ("cuda",), "reference": ("cpu", "cuda")}


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    model: str | None = flag(None, "Local folder, .gguf file or hub id. Without one, the embedded demo model is used.")
    tokenizer: str | None = flag(None, "Tokenizer folder, file or hub id, if it is not the model's own.")
    revision: str | None = flag(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = flag(None, "Where hub downloads are kept (default: the hub cache, HF_HOME).")
    load_format: str = flag(
        "auto", "How to read the weights; dummy makes seeded random ones.", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = flag("auto", "Type of weights and activations.", choices=("auto", "bfloat16", "float16", "float32", "half", "float"))
    max_model_len: int | None = flag(
        None, "Longest sequence, prompt and output together, in tokens (default: the model's own).", metavar="TOKENS"
    )
    quantization: str | None = flag(
        None, "Weight quantization scheme; none is supported yet but GGUF's, which are recognized by themselves.", short="-q"
    )
    skip_tokenizer_init: bool = flag(False, "Do not load a tokenizer: prompts are token ids, outputs have no text.")
    generation_config: str = flag(
        "auto",
        "Sampling defaults: auto reads the model's generation_config.json; none (or vllm, its name there) uses OpenAI's.",
        choices=("auto", "none", "vllm"),
    )
    trust_remote_code: bool = flag(False, "Refused: Octavo never runs code out of a model repository.")
    seed: int = flag(0, "Seed of dummy weights and of requests that bring none.")
    runner: str = flag(
        "auto",
        "What to do with the model: generate text, or only make embeddings (pooling). auto: what it is made for; text models do both.",
        choices=("auto", "generate", "pooling"),
    )
    task: str = flag("auto", "Older way to write --runner: embed is pooling.", choices=("auto", "generate", "embed", "embedding"))
    convert: str = flag("auto", "embed: the same as --runner pooling.", choices=("auto", "none", "embed"))
    pooler_config: str | None = flag(
        None,
        'How embeddings are made, as JSON: {"pooling_type": "LAST", "MEAN" or "CLS", "normalize": true} (default: the model\'s own).',
        aliases=("--override-pooler-config",),
        metavar="JSON",
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """KV cache"""

    block_size: int = flag(16, "Tokens per KV block.", choices=(8, 16, 32, 64, 128, 256))
    gpu_memory_utilization: float = flag(0.9, "Share of the GPU's memory that Octavo may use, 0 to 1.")
    kv_cache_memory: int | None = flag(
        None, "Size of the KV cache in bytes (suffixes K, M, G), instead of a share.", metavar="BYTES", parse="bytes"
    )
    num_gpu_blocks_override: int | None = flag(None, "Number of KV blocks, whatever memory says (for tests).", metavar="BLOCKS")
    enable_prefix_caching: bool = flag(True, "Reuse the KV cache of equal prompt beginnings.")
    swap_space: float | None = flag(
        None,
        "GiB of main memory for the KV cache of preempted sequences; 0, which auto (the default) chooses for now: they are recomputed.",
        metavar="GIB|auto",
        auto=True,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduling"""

    max_num_seqs: int | None = flag(
        None,
        f"Most sequences that run at the same time; auto (the default): {FEW_ROWS}, on a GPU of 64 GiB or more {MANY_ROWS} if they fit.",
        metavar="N|auto",
        auto=True,
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "Token budget: most tokens that one step may advance; auto (the default) also rations prompts beside decodes by predicted time.",
        metavar="TOKENS|auto",
        auto=True,
    )
    itl_slo_ms: float | None = flag(
        None, "Longest wanted gap between two tokens of a stream: prompts are split so that steps take no longer.", metavar="MS"
    )
    enable_chunked_prefill: bool = flag(True, "Split long prompts over several steps.")
    scheduling_policy: str = flag("fcfs", "Who goes first.", choices=("fcfs", "priority"))


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Device"""

    device: str = flag("auto", "Where to run.", choices=("auto", "cpu", "cuda"))
    attention_backend: str = flag(
        "auto",
        "Attention kernels; auto takes the fastest that is there.",
        choices=("auto", *ATTENTION_DEVICES),
    )
    enforce_eager: bool = flag(False, "Do not use CUDA graphs.")
    tensor_parallel_size: int = flag(1, "Number of GPUs that share every layer.", short="-tp")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelOptions, CacheOptions, SchedulerOptions, DeviceOptions):
    """Everything that the engine process needs. Raises ConfigError for a value out of range."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.metadata.get("auto") and getattr(self, f.name) == "auto":
                object.__setattr__(self, f.name, None)
        read_sizes(self)
        check_types(self)
        check_choices(self)
        self._check_backend()
        if self.trust_remote_code:
            raise ConfigError(
                "--trust-remote-code is refused: Octavo never runs code out of a model repository. "
                "Serve a supported architecture without it."
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}.")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, got {self.tensor_parallel_size}.")
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_cache_memory", "num_gpu_blocks_override"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag_name(name)} must be at least 1, got {value}.")
        if self.itl_slo_ms is not None:
            if not 0 < self.itl_slo_ms < float("inf"):
                raise ConfigError(f"--itl-slo-ms must be a number of milliseconds above 0, got {self.itl_slo_ms}.")
            if not self.enable_chunked_prefill:
                raise ConfigError("--itl-slo-ms needs chunked prefill, to split prompts; leave out --no-enable-chunked-prefill.")
        if self.swap_space is not None and not 0 <= self.swap_space < float("inf"):
            raise ConfigError(f"--swap-space must be a number of GiB, at least 0, got {self.swap_space}.")
        _ = self.runner_asked, self.pooler_options  # they raise for what cannot be
        if self.quantization not in (None, "none"):
            raise ConfigError(f"--quantization {self.quantization} is not supported yet; serve the unquantized model, or a GGUF file.")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.rows:
            given = f"--max-num-seqs ({self.rows})" if self.max_num_seqs else f"the {self.rows} of --max-num-seqs auto"
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least {given}, "
                "so that every running sequence can advance in each step."
            )

    def _check_backend(self) -> None:
        fitting = [name for name, devices in ATTENTION_DEVICES.items() if self.device in devices]
        if "auto" not in (self.device, self.attention_backend) and self.attention_backend not in fitting:
            raise ConfigError(
                f"--attention-backend {self.attention_backend} can't run on --device {self.device}; use {' or '.join(fitting)}, or leave "
                "it out."
            )

    @property
    def rows(self) -> int:
        """Most sequences that run at the same time: --max-num-seqs, once it is resolved."""
        return self.max_num_seqs or FEW_ROWS

    @property
    def runner_asked(self) -> str:
        """auto, generate or pooling, out of --runner, --task and --convert. ConfigError if they contradict each other."""
        from_task = {"auto": "auto", "generate": "generate"}.get(self.task, "pooling")
        from_convert = "pooling" if self.convert == "embed" else "auto"
        said = {name for name in (self.runner, from_task, from_convert) if name != "auto"}
        if len(said) > 1:
            raise ConfigError(
                f"--runner {self.runner}, --task {self.task} and --convert {self.convert} contradict each other; --runner alone will do."
            )
        return said.pop() if said else "auto"

    @property
    def pooler_options(self) -> dict[str, Any]:
        """--pooler-config, checked: ``pooling_type`` (LAST, MEAN or CLS) and ``normalize``, as far as they are given."""
        if self.pooler_config is None:
            return {}
        import json

        try:
            sent = json.loads(self.pooler_config)
        except ValueError as error:
            raise ConfigError(f'--pooler-config is not valid JSON ({error}); write for example \'{{"pooling_type": "MEAN"}}\'.') from None
        if not isinstance(sent, dict):
            raise ConfigError("--pooler-config must be a JSON object.")
        names = {"pooling_type": "pooling_type", "seq_pooling_type": "pooling_type"}
        names |= {"normalize": "normalize", "use_activation": "normalize"}
        options: dict[str, Any] = {}
        for name, value in sent.items():
            if name not in names:
                raise ConfigError(f"--pooler-config: {name!r} is not supported; supported: pooling_type, normalize.")
            options[names[name]] = value
        if str(options.get("pooling_type", "LAST")).upper() not in ("LAST", "MEAN", "CLS"):
            raise ConfigError(f"--pooler-config: pooling_type {options['pooling_type']!r} is not supported; supported: LAST, MEAN, CLS.")
        if not isinstance(options.get("normalize", True), bool):
            raise ConfigError("--pooler-config: normalize must be true or false.")
        return options

    def token_budget(self, max_model_len: int, device_type: str) -> int:
        """Most tokens that one step may advance; executors size their buffers by it. ``device_type``: cpu or cuda.

        Without chunked prefill the longest prompt must fit beside a full batch of decodes, or it might never run:
        ConfigError when --max-num-batched-tokens says less.
        """
        budget = self.max_num_batched_tokens or max(2048 if device_type == "cpu" else 8192, self.rows)
        if self.enable_chunked_prefill:
            return budget
        least = max_model_len + self.rows
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < least:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least {least} without chunked prefill: the longest "
                f"prompt ({max_model_len}) beside a full batch ({self.rows}). Raise it, or leave it out."
            )
        return max(budget, least)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from keyword arguments; an unknown one is a ConfigError that says what to write instead, or suggests the nearest."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in kwargs:
            if name not in known:
                raise ConfigError(_unknown_option(name, known))
        return cls(**kwargs)


def _unknown_option(name: str, known: Collection[str]) -> str:
    """Flags are keyword arguments here, so what is known of others' flags helps; those of ours are then written as arguments."""
    if name in ServerOptions.__dataclass_fields__:
        return f"{name!r} is an option of the server (octavo serve {flag_name(name)}); leave it out here."
    hint = explain(flag_name(name), repr(name), "option")
    if hint is None:
        near = difflib.get_close_matches(name, known, n=1)
        return f"Unknown option {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
    hint = re.sub(r"--([a-z][a-z-]*[a-z])", lambda m: n if (n := m[1].replace("-", "_")) in known else m[0], hint)
    return hint[0].upper() + hint[1:]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Server"""

    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = flag(8000, "Port to listen on.")
    served_model_name: tuple[str, ...] = flag((), "Names that clients may ask for (default: the MODEL argument).", repeat=True, nargs="+")
    api_server_count: int = flag(
        1, "HTTP processes that share the port and the engine; more than one for thousands of streams.", short="-asc"
    )
    api_key: tuple[str, ...] = flag((), "Keys that clients must send; repeat the flag for several. Also OCTAVO_API_KEY.", repeat=True)
    api_key_file: str | None = flag(None, "File with one key a line; empty lines and lines that begin with # are skipped.", metavar="FILE")
    chat_template: str | None = flag(None, "Jinja file or text that replaces the model's chat template.")
    trust_request_chat_template: bool = flag(False, "Take chat templates from requests (chat_template): a template is a program.")
    tool_call_parser: str | None = flag(None, "Format of the model's tool calls (default: by its chat template; none: tools are refused).")
    reasoning_parser: str | None = flag(None, "Format of the model's reasoning (default: by its template; none: it stays in the text).")
    enable_auto_tool_choice: bool = flag(True, "Let the model decide whether to call a tool; without, calls can only be forced.")
    stream_tool_arguments: bool = flag(True, "Stream a call's arguments as they come; without, a call is sent when it is whole.")
    metrics_require_api_key: bool = flag(False, "Ask for the API key on /metrics too.")
    disable_web_ui: bool = flag(False, "Do not serve the web page (chat and dashboard) at /.")
    disable_log_requests: bool = flag(False, "Do not log a line per request.")
    disable_log_stats: bool = flag(False, "Do not log a line about the load every ten seconds.")
    log_level: str = flag("info", "How much to log.", choices=("debug", "info", "warning", "error"))
    max_logprobs: int = flag(20, "Most logprobs that a request may ask for.")
    max_n: int = flag(128, "Most sequences (n) that a request may ask for.")
    max_prompts_per_request: int = flag(2048, "Most prompts in one completions request.")
    max_body_size: int = flag(16 * 2**20, "Largest request body in bytes (suffixes K, M, G).", metavar="BYTES", parse="bytes")
    max_queued_requests: int | None = flag(
        None, "Most requests that may wait for room in the engine; more are refused with 503 and Retry-After (default: no limit)."
    )
    max_requests_per_minute: int | None = flag(None, "Most requests a minute of one API key (default: no limit).")
    max_tokens_per_minute: int | None = flag(None, "Most tokens a minute, prompt and output, of one API key (default: no limit).")
    max_concurrent_requests_per_key: int | None = flag(None, "Most requests of one API key at the same time (default: no limit).")
    client_write_timeout: float = flag(
        60.0, "Seconds after which a client that reads nothing of its answer is cut off, and its request ended.", metavar="SECONDS"
    )
    drain_timeout: float = flag(
        30.0, "Seconds that running requests get to finish after SIGTERM; a second SIGTERM ends them.", metavar="SECONDS"
    )
    root_path: str = flag("", "Path under which a proxy serves this server; requests are taken with and without it.", metavar="PATH")
    allowed_origins: tuple[str, ...] = flag(
        (), "Web pages of these origins may call the server from a browser (CORS); * for all (default: none).", repeat=True, nargs="+"
    )
    allowed_methods: tuple[str, ...] = flag(("*",), "Methods that such pages may use (default: all).", repeat=True, nargs="+")
    allowed_headers: tuple[str, ...] = flag(("*",), "Headers that such pages may send (default: all).", repeat=True, nargs="+")
    allow_credentials: bool = flag(False, "Browsers may send cookies along from such pages.")
    ssl_keyfile: str | None = flag(None, "Private key (PEM): serve https.", metavar="FILE")
    ssl_certfile: str | None = flag(None, "Certificate chain (PEM): serve https.", metavar="FILE")
    ssl_ca_certs: str | None = flag(None, "Authorities (PEM) that clients' certificates are checked against.", metavar="FILE")
    ssl_cert_reqs: int = flag(0, "Whether clients must show a certificate: 0 no, 1 they may, 2 they must.", choices=(0, 1, 2))


def flag_name(name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``."""
    return "--" + name.replace("_", "-")


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "tuple[str, ...]": (tuple, list),
}


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:([KMGTkmgt]?)|([KMGTkmgt])(i?)[Bb]|[Bb])")


def size_of(text: str) -> int:
    """``"2G"`` -> 2147483648. K, M, G, T are powers of 1,024 (so are KiB …); k, m, g, t and KB … powers of 1,000. ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with an optional suffix such as 512M, 2G or 1GiB")
    number, plain, byte_unit, binary = match.groups()
    if byte_unit:
        unit = _UNITS[byte_unit.upper() if binary else byte_unit.lower()]
    else:
        unit = _UNITS[plain or ""]
    value = float(number) * unit
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def read_sizes(options: Any) -> None:
    """Turn the texts of size fields (``parse="bytes"``) into bytes, as the command line does. ConfigError for what is no size."""
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        if f.metadata.get("parse") == "bytes" and isinstance(value, str):
            try:
                object.__setattr__(options, f.name, size_of(value))
            except ValueError as error:
                raise ConfigError(f"{f.name}: {error}.") from None


def check_types(options: Any) -> None:
    """Raise ConfigError for a field whose value has another type than it is declared with (Python callers; flags are parsed)."""
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        base, _, optional = f.type.partition(" | ")
        if value is None and optional:
            continue
        if not isinstance(value, _TYPES[base]) or (isinstance(value, bool) and base != "bool"):
            kind = {"str": "a string", "bool": "True or False", "int": "an integer", "float": "a number"}.get(base, "a list of strings")
            raise ConfigError(f"{f.name} must be {kind}, got {value!r}.")


def check_choices(options: Any) -> None:
    """Raise ConfigError for a field whose value is not among its ``choices``."""
    for f in dataclasses.fields(options):
        choices = f.metadata.get("choices")
        value = getattr(options, f.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{flag_name(f.name)} must be one of {', '.join(map(str, choices))}; got {value!r}.")
