"""The benchmarks' options: one field = one flag, under the names that vLLM's users know where there is one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.config import check_choices, flag, flag_name
from octavo.errors import ConfigError

ENDPOINTS = {"octavo": "/v1/completions", "vllm": "/v1/completions", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "shared-prefix", "sonnet", "sharegpt", "custom")
OWN_FLAGS = {"random_": "random", "prefix_repetition_": "shared-prefix", "sonnet_": "sonnet", "sharegpt_": "sharegpt", "custom_": "custom"}
METRICS = ("ttft", "tpot", "itl", "e2el")
SLOS = ("ttft", "tpot", "e2el")
POINT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Server to measure"""

    backend: str = flag("openai", "What serves; openai-chat asks for chats, the others for completions.", choices=tuple(ENDPOINTS))
    base_url: str | None = flag(None, "Address, such as http://127.0.0.1:8000, instead of --host and --port.", metavar="URL")
    host: str = flag("127.0.0.1", "Address of the server.")
    port: int = flag(8000, "Port of the server.")
    endpoint: str | None = flag(None, "Route: /v1/completions or /v1/chat/completions (default: by --backend).", metavar="PATH")
    model: str | None = flag(None, "Name of the model (default: the first that the server lists).")
    served_model_name: str | None = flag(None, "Name to ask the server for, if it is not --model.", metavar="NAME")
    tokenizer: str | None = flag(None, "Local folder or file with the model's tokenizer (default: the server's /tokenize).", metavar="PATH")
    api_key: str | None = flag(None, "Key to send (default: OCTAVO_API_KEY or OPENAI_API_KEY).", metavar="KEY")
    header: tuple[str, ...] = flag((), "Further headers to send, as NAME=VALUE.", repeat=True, nargs="+", metavar="NAME=VALUE")
    insecure: bool = flag(False, "Do not check the certificate of an https server.")
    ready_check_timeout_sec: float = flag(600.0, "Seconds to wait for the server's first answer.", metavar="SECONDS")
    request_timeout: float = flag(21600.0, "Seconds after which a request counts as failed.", metavar="SECONDS")

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("ready_check_timeout_sec", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag_name(name)} must be more than 0, got {getattr(self, name)}.")
        for text in self.header:
            if "=" not in text or any(c in text for c in "\r\n"):
                raise ConfigError(f"--header {text!r}: must look like NAME=VALUE.")
        chat = self.path.rstrip("/").endswith("/chat/completions")
        if not chat and not self.path.rstrip("/").endswith("/completions"):
            raise ConfigError(f"--endpoint {self.path}: must end with /completions or /chat/completions.")
        if not self.path.startswith("/"):
            raise ConfigError(f"--endpoint {self.path}: must begin with a slash, as /v1/completions does.")
        if self.backend == "openai-chat" and not chat:
            raise ConfigError("--backend openai-chat needs an --endpoint that ends with /chat/completions.")

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def is_chat(self) -> bool:
        return self.path.rstrip("/").endswith("/chat/completions")

    @property
    def url(self) -> str:
        return self.base_url or f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Prompts"""

    dataset_name: str = flag("random", "Where prompts come from.", choices=DATASETS)
    dataset_path: str | None = flag(None, "File for sharegpt and custom: JSON or JSON lines.", metavar="FILE")
    disable_shuffle: bool = flag(False, "Take the file's prompts in their order.")
    input_len: int | None = flag(None, "Prompt tokens, whatever the dataset calls them.", metavar="TOKENS")
    output_len: int | None = flag(None, "Output tokens, whatever the dataset calls them.", metavar="TOKENS")
    prompt_format: str = flag(
        "auto",
        "Send texts or token ids; auto sends texts if their tokens can be counted.",
        choices=("auto", "text", "token-ids"),
    )
    random_input_len: int = flag(1024, "random: prompt tokens.", metavar="TOKENS")
    random_output_len: int = flag(128, "random: output tokens.", metavar="TOKENS")
    random_range_ratio: float = flag(0.0, "random: lengths are drawn from LEN·(1-X) to LEN·(1+X).")
    random_prefix_len: int = flag(0, "random: tokens that all prompts begin with, on top of the prompt tokens.", metavar="TOKENS")
    prefix_repetition_prefix_len: int = flag(256, "shared-prefix: tokens that a group's prompts begin with.", metavar="TOKENS")
    prefix_repetition_suffix_len: int = flag(256, "shared-prefix: tokens that follow, different in each prompt.", metavar="TOKENS")
    prefix_repetition_num_prefixes: int = flag(10, "shared-prefix: number of groups.")
    prefix_repetition_output_len: int = flag(128, "shared-prefix: output tokens.", metavar="TOKENS")
    sonnet_input_len: int = flag(550, "sonnet: prompt tokens, about.", metavar="TOKENS")
    sonnet_output_len: int = flag(150, "sonnet: output tokens.", metavar="TOKENS")
    sonnet_prefix_len: int = flag(200, "sonnet: tokens, about, that all prompts begin with.", metavar="TOKENS")
    sharegpt_output_len: int | None = flag(None, "sharegpt: output tokens (default: the length of the file's answer).", metavar="TOKENS")
    custom_output_len: int | None = flag(None, "custom: output tokens where a line does not say (default: 256).", metavar="TOKENS")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs --dataset-path FILE.")
        if self.dataset_name not in ("sharegpt", "custom") and self.dataset_path is not None:
            raise ConfigError(f"--dataset-path is for --dataset-name sharegpt and custom, not for {self.dataset_name}.")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), got {self.random_range_ratio}.")
        if self.input_len is not None and self.dataset_name in ("sharegpt", "custom"):
            raise ConfigError("--input-len cannot be set for prompts from a file.")
        for field in fields(self):
            owner = next((dataset for begin, dataset in OWN_FLAGS.items() if field.name.startswith(begin)), self.dataset_name)
            if owner != self.dataset_name and getattr(self, field.name) != field.default:
                raise ConfigError(f"{flag_name(field.name)} is for --dataset-name {owner}, not for {self.dataset_name}.")
        zero_is_fine = ("random_prefix_len", "sonnet_prefix_len", "prefix_repetition_prefix_len")
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < (0 if name in zero_is_fine else 1):
                raise ConfigError(f"{flag_name(name)} must be at least {0 if name in zero_is_fine else 1}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Load"""

    num_prompts: int | None = flag(None, "Number of requests (default: 1000).")
    request_rate: float = flag(math.inf, "Requests a second, on average; inf sends all at once.")
    burstiness: float = flag(1.0, "Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, more is steadier.")
    max_concurrency: int | None = flag(None, "Most requests at the same time; the others wait in the client (default: no limit).")
    num_warmups: int = flag(0, "Requests before the measurement, up to --max-concurrency at a time.", aliases=("--warmups",))
    seed: int = flag(0, "Seed of prompts and arrival times.")

    def __post_init__(self) -> None:
        check_rate("--request-rate", self.request_rate)
        check_at_least(self, 1, "num_prompts", "max_concurrency")
        check_at_least(self, 0, "num_warmups", "seed")  # Python's generators take -1 for 1
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be more than 0, got {self.burstiness}.")

    def check_arrivals(self, rate_flag: str) -> None:
        """ConfigError if ``burstiness`` was set and there is no rate, given by ``rate_flag``, whose gaps it could shape."""
        if math.isinf(self.request_rate) and self.burstiness != 1:
            raise ConfigError(f"--burstiness shapes the arrivals of {rate_flag}; without a rate there are none to shape.")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling"""

    temperature: float | None = flag(0.0, "0 always takes the likeliest token.")
    top_p: float | None = flag(None, "Keep the likeliest tokens that together have this probability (default: the server's).")
    top_k: int | None = flag(None, "Keep this many of the likeliest tokens (default: the server's).")
    min_p: float | None = flag(None, "Keep tokens at least this likely, relative to the likeliest (default: the server's).")
    presence_penalty: float | None = flag(None, "Lowers tokens that occurred in the output (default: the server's).")
    frequency_penalty: float | None = flag(None, "Lowers tokens by how often they occurred in the output (default: the server's).")
    repetition_penalty: float | None = flag(None, "Divides the logits of tokens that occurred (default: the server's).")
    logprobs: int | None = flag(None, "Ask for the log-probabilities of this many likeliest tokens.")
    ignore_eos: bool = flag(False, "Go on after the end-of-sequence token, so that outputs have their full length.")
    extra_body: str | None = flag(None, "Further fields of each request, as a JSON object.", metavar="JSON")

    def __post_init__(self) -> None:
        if self.extra_body is not None:
            try:
                data = json.loads(self.extra_body)
            except ValueError as error:
                raise ConfigError(f"--extra-body {self.extra_body!r} is not JSON: {error}.") from None
            if not isinstance(data, dict):
                raise ConfigError(f"--extra-body {self.extra_body!r} is not a JSON object.")

    def fields(self, is_chat: bool) -> dict[str, Any]:
        """What a request's body has because of these options."""
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        body: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ignore_eos:
            body["ignore_eos"] = True  # left out otherwise: OpenAI's own servers refuse it
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if is_chat else {"logprobs": self.logprobs}
        return body | (json.loads(self.extra_body) if self.extra_body else {})


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Results"""

    percentile_metrics: str = flag(",".join(METRICS), "Latencies to report, separated by commas.", metavar="NAME,NAME")
    metric_percentiles: str = flag("90,99", "Percentiles to report, separated by commas.", metavar="X,X")
    goodput: tuple[str, ...] = flag(
        (), "Service levels in ms, such as ttft:200 tpot:20 e2el:5000: also count the requests a second that met all.",
        repeat=True, nargs="+", metavar="NAME:MS",
    )  # fmt: skip
    save_result: bool = flag(False, "Write the result as JSON.")
    save_detailed: bool = flag(False, "Write every request's lengths, times, text and error, too.")
    append_result: bool = flag(False, "Append to the file, a JSON object a line.")
    result_dir: str | None = flag(None, "Folder for the result (default: the current one).", metavar="FOLDER")
    result_filename: str | None = flag(None, "Name of the result file (default: made of backend, load, model and date).", metavar="NAME")
    label: str | None = flag(None, "Beginning of the default file name; kept in the result.", metavar="TEXT")
    metadata: tuple[str, ...] = flag((), "Further entries of the result.", repeat=True, nargs="+", metavar="KEY=VALUE")
    disable_tqdm: bool = flag(False, "No progress bar.")

    def __post_init__(self) -> None:
        if not set(self.metrics) <= set(METRICS):
            raise ConfigError(f"--percentile-metrics {self.percentile_metrics!r}: known are {', '.join(METRICS)}.")
        if not all(0 <= p <= 100 for p in self.percentiles):
            raise ConfigError(f"--metric-percentiles {self.metric_percentiles!r}: must be from 0 to 100.")
        for text in self.metadata:
            if "=" not in text:
                raise ConfigError(f"--metadata {text!r}: must look like KEY=VALUE.")
        _ = self.slos

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.percentile_metrics.split(",") if part.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        return parse_numbers("--metric-percentiles", self.metric_percentiles)

    @property
    def slos(self) -> dict[str, float]:
        """Metric to the most milliseconds that it may take."""
        slos: dict[str, float] = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            try:
                slos[name] = float(value)
            except ValueError:
                slos[name] = math.nan
            if name not in SLOS or not slos[name] > 0:
                raise ConfigError(f"--goodput {text!r}: must look like NAME:MS with NAME one of {', '.join(SLOS)} and MS above 0.")
        return slos


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Sweep"""

    concurrencies: str | None = flag(None, "Numbers of requests at the same time (default: 1,2,4,8,16,32,64).", metavar="N,N")
    request_rates: str | None = flag(None, "Instead: requests a second.", metavar="X,X")
    point_seconds: float = flag(POINT_SECONDS, "With rates, without --num-prompts: how long each is kept up.", metavar="SECONDS")
    slo_ttft_ms: float | None = flag(None, "Most milliseconds to the first token.", metavar="MS")
    slo_tpot_ms: float | None = flag(None, "Most milliseconds per further token.", metavar="MS")
    slo_percentile: float = flag(99.0, "Share of requests, in percent, that must keep the service level.")
    plot: str | None = flag(
        None, "PNG file for the plot, in --result-dir; none for no plot (default: sweep.png, if matplotlib is there).", metavar="FILE"
    )

    def __post_init__(self) -> None:
        if self.concurrencies is not None and self.request_rates is not None:
            raise ConfigError("Give either --concurrencies or --request-rates.")
        if any(not 0 < rate < math.inf for rate in self.rates or ()):
            raise ConfigError(f"--request-rates {self.request_rates}: must be numbers above 0.")
        if self.rates is None and any(math.isinf(n) or n < 1 or n != int(n) for n in self.loads):
            raise ConfigError(f"--concurrencies {self.concurrencies}: must be whole numbers of at least 1.")
        if not 0 < self.slo_percentile <= 100:
            raise ConfigError(f"--slo-percentile must be in (0, 100], got {self.slo_percentile}.")
        for name in ("slo_ttft_ms", "slo_tpot_ms", "point_seconds"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{flag_name(name)} must be more than 0, got {getattr(self, name)}.")
        if math.isinf(self.point_seconds):
            raise ConfigError("--point-seconds must be a number of seconds, got inf.")
        if self.rates is None and self.point_seconds != POINT_SECONDS:
            raise ConfigError("--point-seconds is for --request-rates, not for --concurrencies.")

    @property
    def rates(self) -> tuple[float, ...] | None:
        return None if self.request_rates is None else parse_numbers("--request-rates", self.request_rates)

    @property
    def loads(self) -> tuple[float, ...]:
        """The rates or concurrencies in rising order."""
        values = self.rates or parse_numbers("--concurrencies", self.concurrencies or "1,2,4,8,16,32,64")
        return tuple(sorted(set(values)))


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """Throughput"""

    num_prompts: int = flag(1000, "Number of prompts.")
    n: int = flag(1, "Continuations per prompt.")
    disable_detokenize: bool = flag(False, "Leave out turning output tokens into text.")
    output_json: str | None = flag(None, "Write the result there.", metavar="FILE")
    disable_tqdm: bool = flag(False, "No progress bar.")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_prompts", "n")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Latency"""

    input_len: int = flag(32, "Prompt tokens.", metavar="TOKENS")
    output_len: int = flag(128, "Output tokens.", metavar="TOKENS")
    batch_size: int = flag(8, "Prompts at once.")
    n: int = flag(1, "Continuations per prompt.")
    num_iters_warmup: int = flag(10, "Iterations before the measurement.")
    num_iters: int = flag(30, "Iterations to measure.")
    disable_detokenize: bool = flag(False, "Leave out turning output tokens into text.")
    output_json: str | None = flag(None, "Write the result there.", metavar="FILE")
    disable_tqdm: bool = flag(False, "No progress bar.")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "input_len", "output_len", "batch_size", "n", "num_iters")
        check_at_least(self, 0, "num_iters_warmup")


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """Start-up"""

    what: str = flag("both", "What to start: the server, the offline LLM, or one after the other.", choices=("serve", "llm", "both"))
    repeat: int = flag(3, "Starts of each.")
    empty_caches: bool = flag(False, "Start with empty folders for built kernels, as on a new machine.")
    timeout: float = flag(900.0, "Seconds that a start may take.", metavar="SECONDS")
    output_json: str | None = flag(None, "Write the result there.", metavar="FILE")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "repeat")
        if not self.timeout > 0:
            raise ConfigError(f"--timeout must be more than 0, got {self.timeout}.")


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """``"90,99.9"`` -> (90.0, 99.9). Raises ConfigError naming the flag."""
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values or any(math.isnan(v) for v in values):
        raise ConfigError(f"{name}: {text!r} is not a number, or a list of numbers separated by commas.")
    return values


def check_at_least(options: Any, low: int, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"{flag_name(name)} must be at least {low}, got {value}.")


def check_rate(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be more than 0 (or inf), got {value}.")


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """``["a=1"]`` -> {"a": "1"}; checked by the options already."""
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
