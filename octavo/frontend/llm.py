"""Offline use: ``LLM(model=…).generate(prompts, params)``, both halves of the engine in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.env import prepare_cpu_libraries
from octavo.errors import ConfigError, RequestError
from octavo.frontend.beam_search import BeamSearchParams, start_search
from octavo.frontend.chat_template import ChatTemplate, read_chat_template
from octavo.frontend.embedder import Embedding
from octavo.frontend.grammar_compiler import GrammarCompiler
from octavo.frontend.inputs import Prompt, check_prompt, parse_prompts, truncate_prompt
from octavo.frontend.output_processor import RequestOutputs
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.parts import find_model, load_model_parts
from octavo.garbage import rare_collections
from octavo.models.pooling import resolve_roles
from octavo.types import GenerateRequest

SAMPLING_ONLY = {*SamplingParams.__struct_fields__} - {f.name for f in dataclasses.fields(EngineConfig)}


class LLM(Embedding):
    """A model for offline batches. Keyword arguments are the fields of ``EngineConfig`` (vLLM's names).

    Raises ConfigError (unknown or impossible option), ModelError (model not found or not supported) and
    OutOfMemoryError (weights or KV cache don't fit), each saying what to change.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        model, tokenizer = (os.fspath(p) if isinstance(p, os.PathLike) else p for p in (model, tokenizer))
        for name in sorted(options.keys() & SAMPLING_ONLY):
            raise ConfigError(f"{name!r} is a sampling parameter: give it to SamplingParams, which generate and chat take.")
        self.config = EngineConfig.from_kwargs(model=model, tokenizer=tokenizer, **options)
        parts = load_model_parts(self.config, find_model(self.config), chat_template)
        self.model_config, self.tokenizer, self.chat_template = parts.model_config, parts.tokenizer, parts.chat_template
        self.roles = resolve_roles(self.config, self.model_config)
        self.grammars = GrammarCompiler(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)
        self._ids = itertools.count()
        self._turn = threading.RLock()  # threads that share an LLM run their batches one after another

        prepare_cpu_libraries()
        from octavo.executor.local import resolve_device  # imports torch
        from octavo.executor.select import make_executor

        config = self.config
        paced = config.itl_slo_ms is not None or not config.enable_chunked_prefill or config.max_num_batched_tokens is not None
        if not paced and not self.model_config.encoder:
            # Nobody reads along, so prompts need not be rationed beside answers: with a fixed token budget they are not.
            device = "cpu" if resolve_device(config).type == "cpu" else "cuda"
            config = dataclasses.replace(config, max_num_batched_tokens=config.token_budget(parts.max_model_len, device))
        self.executor = make_executor(config, self.model_config, max_model_len=parts.max_model_len)
        self.config = self.executor.config
        self.max_model_len = self.executor.max_model_len
        self.engine = Engine(self.config, self.executor, max_model_len=self.max_model_len)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json), unless ``generation_config="none"``."""
        return SamplingParams(**self.model_config.generation_defaults)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the prompts' order.

        prompts: a text, token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of these.
        sampling_params: one for all, or one per prompt; None takes the model's defaults.
        Raises RequestError for a prompt or parameter that can't be served; nothing runs then.
        """
        return self._run(parse_prompts(prompts, self.tokenizer), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists)."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and skip_tokenizer_init is set.")
        template = ChatTemplate(read_chat_template(chat_template), self.tokenizer) if chat_template else self.chat_template
        if tools and not template.takes_tools:
            raise RequestError("tools: this model's chat template has no place for them; leave them out.", param="tools")
        if not isinstance(messages, (list, tuple)):
            kind = type(messages).__name__
            raise RequestError(f"messages must be a list of messages, or a list of such lists; got {kind}.", param="messages")
        conversations = messages if messages and isinstance(messages[0], (list, tuple)) else [messages]
        prompts = []
        for conversation in conversations:
            text = template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            prompts.append(Prompt(text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._run(prompts, sampling_params, use_tqdm, None)

    def beam_search(self, prompts: Any, params: BeamSearchParams | None = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Continue every prompt by beam search: ``outputs`` are the sequences found, best first, with ``cumulative_logprob``.

        Prompts as in ``generate``. Finds what transformers' ``generate(num_beams=beam_width)`` finds.
        Raises RequestError for a prompt or parameter that can't be served; nothing runs then.
        """
        params = BeamSearchParams() if params is None else msgspec.structs.replace(params)  # checks it again
        parsed = parse_prompts(prompts, self.tokenizer)
        for prompt in parsed:
            check_prompt(prompt.token_ids, params.sampling(n=1), max_model_len=self.max_model_len, vocab_size=self.model_config.vocab_size)
        searches = [
            start_search(
                p.token_ids,
                params,
                eos_token_ids=self.model_config.eos_token_ids,
                vocab_size=self.model_config.vocab_size,
                max_model_len=self.max_model_len,
            )
            for p in parsed
        ]
        first: dict[int, RequestOutput] = {}
        bar = _ProgressBar(len(parsed)) if use_tqdm else None
        try:
            while running := [i for i, search in enumerate(searches) if not search.done]:
                asked = [(i, token_ids) for i in running for token_ids in searches[i].prompts]
                answers = self._run(
                    [Prompt(None, token_ids) for _, token_ids in asked], [searches[i].step_params for i, _ in asked], False, None
                )
                for i in running:
                    own = [answer for (j, _), answer in zip(asked, answers, strict=True) if j == i]
                    first.setdefault(i, own[0])
                    searches[i].advance([answer.outputs[0].logprobs[0] for answer in own])  # type: ignore[index]
                    if bar:
                        bar.tokens(len(own))
                        if searches[i].done:
                            bar.request(len(parsed[i].token_ids))
        finally:
            if bar:
                bar.close()
        return [
            RequestOutput(str(next(self._ids)), p.text, p.token_ids, s.outputs(self.tokenizer), True, None, first[i].num_cached_tokens)
            for i, (p, s) in enumerate(zip(parsed, searches, strict=True))
        ]

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        self.grammars.close()
        self.engine.shutdown()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if not self.roles.generates:
            raise RequestError("This model makes embeddings and does not generate text (runner pooling); use embed or score.")
        with rare_collections():  # making a thousand requests is enough to set off a full one
            return self._run_batch(prompts, self._params_per_prompt(sampling_params, len(prompts)), use_tqdm, priority)

    def _run_batch(
        self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(priority)} priorities; give one each.", param="priority")
        if priority is not None and any(priority) and self.config.scheduling_policy != "priority":
            raise RequestError('priority needs LLM(scheduling_policy="priority").', param="priority")
        requests = [
            self._request(prompt, p, priority[i] if priority is not None else 0)
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        states: dict[str, RequestOutputs] = {}
        results: dict[str, RequestOutput] = {}
        for prompt, p, request in zip(prompts, params, requests, strict=True):
            states[request.request_id] = RequestOutputs(request.request_id, prompt.text, request.prompt_token_ids, p, self.tokenizer)
        with self._batch():
            for request in requests:
                self.engine.add_request(request)
            self._loop(states, results, use_tqdm)
        return [results[r.request_id] for r in requests]

    @contextlib.contextmanager
    def _batch(self) -> Iterator[None]:
        """A turn at the engine, for what adds requests and steps until they have ended."""
        with self._turn:
            try:
                yield
            except BaseException:  # Ctrl-C too, in the middle of a step: the next call starts from nothing
                self.engine.abandon()
                raise

    def _loop(self, states: dict[str, RequestOutputs], results: dict[str, RequestOutput], use_tqdm: bool) -> None:
        bar = _ProgressBar(len(states)) if use_tqdm else None
        try:
            while self.engine.has_work():
                deltas = self.engine.step()
                now = time.time()
                for delta in deltas:
                    state = states[delta.request_id]
                    stopped = state.push(delta, now)
                    if stopped:
                        self.engine.abort(delta.request_id, delta.index)
                    if bar:
                        bar.tokens(len(delta.token_ids))
                    if (stopped or delta.finish_reason is not None) and state.finished and delta.request_id not in results:
                        results[delta.request_id] = _whole(state)
                        if bar:
                            bar.request(len(state.prompt_token_ids))
        finally:
            if bar:
                bar.close()

    def _params_per_prompt(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params.clone()] * count  # checks it again: fields may have been set since it was made
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise RequestError(f"sampling_params must be SamplingParams, or a list with one each, got {params!r:.200}.")
        if len(params) != count:
            raise RequestError(f"{count} prompts came with {len(params)} sampling_params; give one, or one each.")
        return [p.clone() for p in params]

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> GenerateRequest:
        token_ids = truncate_prompt(prompt, params.truncate_prompt_tokens).token_ids
        check_prompt(
            token_ids,
            params,
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            max_num_seqs=self.config.max_num_seqs,
        )
        grammar = None
        if params.structured_outputs is not None:
            grammar = self.grammars.compile(params.structured_outputs)
            self.engine.set_vocabulary(self.grammars.vocabulary)
        token_params = params.to_token_params(
            prompt_len=len(token_ids),
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            encode_bad_word=self.tokenizer.encode_bad_word if self.tokenizer else None,
            grammar=grammar,
        )
        return GenerateRequest(
            request_id=str(next(self._ids)),
            prompt_token_ids=token_ids,
            params=token_params,
            arrival_time=time.time(),
            priority=priority,
        )


def _whole(state: RequestOutputs) -> RequestOutput:
    """The finished request; nothing was drained before, so the deltas are the whole."""
    if state.error is not None:
        raise RequestError(state.error, status=state.error_status)
    output = state.drain()
    present = {o.index: o for o in output.outputs}
    output.outputs = [present.get(s.index) or CompletionOutput(s.index, "", []) for s in state.sequences]
    for choice in output.outputs:
        choice.logprobs = None if choice.logprobs is None else list(choice.logprobs)
    return output


class _ProgressBar:
    """Requests done, with input and output tokens per second."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc="Processed prompts", unit="req", dynamic_ncols=True)
        self.start = time.perf_counter()
        self.num_in = self.num_out = 0

    def tokens(self, count: int) -> None:
        self.num_out += count

    def request(self, prompt_tokens: int) -> None:
        self.num_in += prompt_tokens
        elapsed = max(time.perf_counter() - self.start, 1e-9)
        self.bar.set_postfix_str(f"in {self.num_in / elapsed:.1f} tok/s, out {self.num_out / elapsed:.1f} tok/s", refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        self.bar.close()
