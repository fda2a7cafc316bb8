"""Decides what each step does. No tensors, no text, no clocks.

No phases: a step has one token budget, and a plan says how many tokens each sequence advances. Decodes (advances of
one) come first, what there is room for beside them (pace.py) goes to prompts in policy order, and then to new sequences.

One step ahead: ``schedule(N+1)`` may run before ``apply`` of step N. The scheduler then knows how many tokens each
sequence has, not their values. So it plans to a length limit and never past it, learns other ends a step late (what
was drawn past an end is dropped), and resumes a preempted sequence only when all its values have arrived.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from octavo.engine.cost_model import StepWork, pairs_of
from octavo.engine.grammar import Grammar, Grammars, Matcher
from octavo.engine.kv_manager import KVManager
from octavo.engine.pace import Line, Pace, Room
from octavo.engine.policy import POLICIES, SWAP_CALL_S, OrderedSequences, Preemption, RecomputePreemption, SwapPreemption
from octavo.engine.request import Request, Sequence, Status, derive_seed
from octavo.engine.settings import SchedulerSettings
from octavo.engine.swap_tier import AWAY, SwapTier
from octavo.errors import RequestError
from octavo.types import (
    Advance,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RowInit,
    StepPlan,
    StepResult,
    TokenDelta,
    TokenLogprobs,
    TokenMasks,
)


@dataclass(slots=True)
class Chunk:
    """One sequence's advance while it prefills, and the sequences that draw from its last position (often none)."""

    advance: Advance
    seq: Sequence
    drawing: list[Sequence]


@dataclass(slots=True)
class StepRecord:
    """What the scheduler must remember of a planned step to understand its result.

    ``sampled[i]`` is the sequence for which the i-th token of the result was drawn. Rows may have changed hands since.
    """

    step: int
    sampled: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)


class Scheduler:
    """Holds every unfinished request. ``schedule`` and ``apply`` are called for the same steps, in the same order."""

    def __init__(self, settings: SchedulerSettings, preemption: Preemption | None = None) -> None:
        self.settings = settings
        swap = SwapTier(settings.num_cpu_blocks, settings.swap_block_s)
        self.kv = KVManager(settings.num_blocks, settings.block_size, settings.prefix_caching, swap)
        self.policy = POLICIES[settings.policy]()
        swaps = settings.num_cpu_blocks > 0
        self.pace = Pace(settings.max_num_batched_tokens, settings.pace, max_num_seqs=settings.max_num_seqs, learns=swaps)
        self.preemption = preemption or (SwapPreemption(self.pace.costs) if swaps else RecomputePreemption())
        self.requests: dict[str, Request] = {}
        self.waiting = OrderedSequences()
        self.running = OrderedSequences()
        self.free_rows = list(range(settings.max_num_seqs))  # a heap: low rows first keeps the batch compact
        self.in_flight: deque[StepRecord] = deque()
        # Free blocks that admission leaves to the running sequences' growth, or each admission would end in a preemption.
        self.watermark = max(1, settings.num_blocks // 100)
        self.stats = EngineStats()
        self._ready: list[TokenDelta] = []
        self._num_added = 0
        self._num_following = 0  # unfinished sequences with a grammar
        self._last_step = -1  # the last step planned: no later one touches what is released now

    # -- intake ---------------------------------------------------------------------------------------------------------

    def add(self, source: GenerateRequest, grammar: Grammar | None = None, number: int | None = None) -> None:
        """Take a request in. RequestError for one that could never finish here; nothing is kept of it then.

        ``grammar``: the compiled ``params.grammar``, which every one of its sequences follows. ``number``: its place among all
        requests, from ``take_number``, when it has waited elsewhere.
        """
        max_length = self.check(source)
        params = source.params
        counter = self.take_number() if number is None else number
        seed = derive_seed(self.settings.seed, counter) if params.seed is None else params.seed
        request = Request(source, self.policy.order(source, counter), max_length, seed)
        if params.max_tokens == 0 and not request.awaits_prompt_logprobs and source.pooling is None:  # nothing to compute
            self._ready.extend(self._delta(seq, [], "length", request.take_prompt_logprobs()) for seq in request.sequences)
            return
        if grammar is not None:
            for seq in request.sequences:
                seq.matcher = Matcher(grammar)
            self._num_following += len(request.sequences)
        self.requests[request.id] = request
        self.waiting.add(request.sequences[0])

    def take_number(self) -> int:
        """A request's place in the order of arrival. Seeds of those that bring none depend on it."""
        self._num_added += 1
        return self._num_added - 1

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request, or one of its sequences. Unknown or finished ones give no delta and no error."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        ending = [s for s in request.live if index is None or s.index == index]
        for seq in reversed(ending):  # a leader last, so that it hands nothing over to a sequence about to end
            self._end(seq)
        return [self._delta(seq, [], "abort") for seq in ending]

    def continue_from(self, old: Scheduler) -> None:
        """Take over what must not repeat (the numbers that unseeded requests are seeded by), the counters, and what was learnt."""
        self._num_added, self._last_step, self.stats = old._num_added, old._last_step, old.stats
        self.pace, self.preemption = old.pace, old.preemption

    def take_ready(self) -> list[TokenDelta]:
        """Deltas of requests that were finished without a step."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight or self._ready)

    def snapshot(self) -> EngineStats:
        """Statistics as of now, in an object of their own. Running and waiting count sequences; a prompt counts once."""
        stats, kv = self.stats, self.kv
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) - kv.swap.num_sequences,
            num_swapped=kv.swap.num_sequences,
            kv_cache_usage=kv.usage,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=kv.queries,
            prefix_cache_hits=kv.hits,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            num_steps=stats.num_steps,
            cpu_cache_usage=kv.swap.usage,
            num_blocks_out=stats.num_blocks_out,
            num_blocks_in=stats.num_blocks_in,
        )

    # -- planning -------------------------------------------------------------------------------------------------------

    def schedule(self, step: int) -> StepPlan | None:
        """Plan step ``step``, which must then be submitted; None when nothing can run before more results are applied.

        ``step`` grows from plan to plan.
        """
        self.kv.begin_step(step)
        plan = StepPlan(step)
        record = StepRecord(step)
        self._displace()
        prefills = self._plan_decodes(plan, record)
        if prefills or self.waiting.items:
            self._plan_prompts(prefills, plan, record)
        if not plan.advances and not record.chunks:
            return None
        record.chunks.sort(key=lambda chunk: chunk.advance.count > 1)  # stable: advances of one token come first
        for chunk in record.chunks:
            plan.advances.append(chunk.advance)
            record.sampled.extend(chunk.drawing)
            self.kv.publish(chunk.seq)  # only now, so that no sequence of this step reads what this step writes
        record.work.rows = len(record.sampled)
        self._take_moves(plan, record)
        plan.masked = self._num_following > 0 and any(seq.matcher is not None for seq in record.sampled)
        self._last_step = step
        self.in_flight.append(record)
        self.stats.num_steps += 1
        return plan

    def _take_moves(self, plan: StepPlan, record: StepRecord) -> None:
        plan.swap_ins, plan.swap_outs = self.kv.swap.take_moves()
        record.work.moves = len(plan.swap_ins) + len(plan.swap_outs)
        self.stats.num_blocks_in += len(plan.swap_ins)
        self.stats.num_blocks_out += len(plan.swap_outs)

    def _plan_decodes(self, plan: StepPlan, record: StepRecord) -> list[Sequence]:
        """Advance every decoding sequence by one; return those still prefilling.

        In policy order, and a sequence that finds no block takes one from the last in order. So victims are always
        ones that this step has not planned yet.
        """
        prefills: list[Sequence] = []
        advance, sampled = plan.advances.append, record.sampled.append
        context = 0
        running = self.running.items
        for seq in running:  # _grow only removes items behind seq, or seq itself when it is the last
            start = seq.num_computed
            if start < seq.num_prefill:
                prefills.append(seq)
                continue
            after = start + 1  # == seq.length
            if after >= seq.max_length:  # a foreseen end: its last token is in flight
                continue
            if start >= seq.writable and not self._grow(seq, plan):
                break
            seq.num_computed = after
            seq.length = after + 1
            context += after
            advance(Advance(seq.row, start, 1, None, seq.sample_rows))
            sampled(seq)
        work = record.work
        work.decodes = work.rows = len(plan.advances)
        work.context = context
        return prefills

    def _plan_prompts(self, prefills: list[Sequence], plan: StepPlan, record: StepRecord) -> None:
        """Advance prompts, those already running first, by what there is room for beside the decodes."""
        work = record.work
        if work.decodes and self.settings.pace is not None:
            room = self.pace.room(work, self._line(prefills))
        else:
            room = self.pace.whole_room(work)
        for seq in prefills:
            count = room.fit(seq.num_computed, seq.num_prefill - seq.num_computed)
            if count == 0:
                return
            self._plan_chunk(seq, count, room, plan, record)
        self._admit(room, plan, record)

    def _line(self, prefills: list[Sequence]) -> Line:
        """What could be run of prompts now. How much of a waiting one is cached is not known yet: as much as so far, on average."""
        kv, waiting = self.kv, islice(self.waiting.items, len(self.free_rows))
        uncached = 1 - kv.hits / kv.queries if kv.queries else 1.0
        left = [seq.num_prefill - seq.num_computed for seq in prefills]
        left += [int(uncached * len(seq.tokens)) if seq.swapped is None else len(seq.tokens) - seq.swapped.num_computed for seq in waiting]
        first = left[0] if left else 0
        return Line(prefills[0].num_computed if prefills else 0, first, sum(left) - first, len(left))

    def _grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Make the next position writable, at the cost of those behind; False if ``seq`` itself had to give way."""
        while not self.kv.grow(seq, plan):
            victim = self.running.items[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _plan_chunk(self, seq: Sequence, count: int, room: Room, plan: StepPlan, record: StepRecord) -> None:
        """Advance a prefilling sequence by ``count`` tokens; at the end of what it prefills, draw its next token.

        At the end of a prompt all sequences of the request get their rows and draw from the same logits.
        """
        start = seq.num_computed
        room.take(start, count)
        record.work.prompt_tokens += count
        record.work.pairs += pairs_of(start, count)
        end = start + count
        if not seq.row_ready:
            self._init_row(seq, plan)
        advance = Advance(seq.row, start, count, seq.tokens[start:end])
        request = seq.request
        if request.awaits_prompt_logprobs:
            following = request.prompt[start + 1 : end + 1]
            if following:
                advance.prompt_logprobs = request.params.prompt_logprobs
                advance.next_token_ids = following
        if request.pooling is not None:
            advance.pooling, advance.pooling_ends = request.pooling, end == seq.num_prompt
        seq.num_computed = end
        drawing: list[Sequence] = []
        if end == seq.num_prefill and seq.length < seq.max_length:
            drawing = [seq, *request.held]
            for child in drawing[1:]:
                self._fork(seq, child, plan)
            for each in drawing:
                each.length += 1
            advance.sample_rows = tuple(each.row for each in drawing)
        record.chunks.append(Chunk(advance, seq, drawing))

    def _fork(self, parent: Sequence, child: Sequence, plan: StepPlan) -> None:
        child.tokens = list(child.tokens)
        child.status = Status.RUNNING
        self.kv.fork(parent, child)
        self._init_row(child, plan)
        self.running.add(child)

    def _init_row(self, seq: Sequence, plan: StepPlan) -> None:
        request = seq.request
        outputs = seq.tokens[seq.num_prompt :]
        plan.row_inits.append(RowInit(seq.row, request.params, seq.seed, request.prompt, outputs, list(seq.blocks)))
        seq.row_ready = True

    def _admit(self, room: Room, plan: StepPlan, record: StepRecord) -> None:
        """Start waiting sequences, in order and none past one that must wait."""
        waiting = self.waiting.items
        while waiting and room.tokens > 0:
            seq = waiting[0]
            cached = self._admissible(seq)
            if cached is None:
                return
            start = self.kv.start_of(seq, cached)
            wanted = len(seq.tokens) - start
            count = room.fit(start, wanted)
            if count == 0 or (count < wanted and not self.settings.chunked_prefill):
                return
            del waiting[0]
            if (moves := cached.count(AWAY)) > 0:
                room.charge(SWAP_CALL_S + moves * self.settings.swap_block_s)
            self.kv.admit(seq, cached)
            seq.status = Status.RUNNING
            for each in (seq, *seq.request.held):
                each.row = heapq.heappop(self.free_rows)
                each.sample_rows = (each.row,)
            self.running.add(seq)
            self._plan_chunk(seq, count, room, plan, record)

    def _admissible(self, seq: Sequence) -> list[int] | None:
        """The blocks with which ``seq`` may start now (see KVManager.find_cached); None if values, rows or blocks are missing.

        With nothing running, a sequence that passed ``add`` is always admissible, so the queue cannot stall.
        """
        if seq.num_in_flight or len(self.free_rows) < 1 + len(seq.request.held):
            return None
        reserve = self.watermark if self.running.items else 0
        if self.kv.pool.num_free < reserve:
            return None
        cached = self.kv.find_cached(seq)
        return cached if self.kv.fits(seq, cached, reserve) else None

    def _displace(self) -> None:
        """Preempt running sequences that the policy puts below the first waiting one, until that one can start."""
        waiting, running = self.waiting.items, self.running.items
        while waiting and running and self.policy.displaces(waiting[0], running[-1]):
            if waiting[0].num_in_flight or self._admissible(waiting[0]) is not None:
                return
            self._preempt(running[-1])

    def _preempt(self, seq: Sequence) -> None:
        """Take row and blocks away; the sequence (and those it computes the prompt for) waits again."""
        self.running.remove(seq)
        self.preemption.take(seq, self.kv, self._last_step)
        self._free_row(seq)
        for held in seq.request.held:
            self._free_row(held)
        seq.status = Status.WAITING
        self.waiting.add(seq)
        self.stats.num_preemptions += 1

    # -- results --------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[TokenDelta]:
        """Take in what the oldest planned step drew; returns what each sequence gained.

        A stop token is part of ``token_ids``. Tokens drawn past a sequence's end are dropped.
        """
        record = self.in_flight.popleft()
        if result.step != record.step or len(result.token_ids) != len(record.sampled):
            raise RuntimeError(
                f"the executor answered step {result.step} with {len(result.token_ids)} tokens, "
                f"expected step {record.step} with {len(record.sampled)}"
            )
        deltas: list[TokenDelta] = []
        if result.errors:
            self._apply_errors(record, result, deltas)
        if record.chunks:
            self._apply_prompts(record, result, deltas)
        finished, logprobs = Status.FINISHED, result.logprobs
        num_accepted = 0
        for i, token in enumerate(result.token_ids):
            seq = record.sampled[i]
            if seq.status is finished:  # overshoot, or aborted meanwhile
                continue
            tokens, request = seq.tokens, seq.request
            tokens.append(token)
            num_accepted += 1
            length = len(tokens)
            delta = TokenDelta(request_id=request.id, index=seq.index, token_ids=[token], num_cached_tokens=request.num_cached_tokens)
            if logprobs is not None and logprobs[i] is not None:
                delta.logprobs = [logprobs[i]]
            if request.prompt_logprobs is not None:  # the request's first token, from its leader
                delta.prompt_logprobs = request.take_prompt_logprobs()
            if length >= seq.publish_at:
                self.kv.publish(seq)
            if token in request.end_ids and length >= seq.min_length:
                delta.finish_reason = "stop"
                delta.stop_reason = None if token in request.params.eos_token_ids else token
                self._end(seq)
            elif seq.matcher is not None and not seq.matcher.accept(token):
                self._fail(seq, deltas)
                continue
            elif seq.matcher is not None and seq.matcher.finished:  # no end token needed, nor min_tokens: nothing can follow
                delta.finish_reason = "stop"
                delta.ends_in_text = True
                self._end(seq)
            elif length >= seq.max_length:
                delta.finish_reason = "length"
                self._end(seq)
            deltas.append(delta)
        self.stats.generation_tokens += num_accepted
        return deltas

    def masks(self, grammars: Grammars) -> tuple[TokenMasks, list[TokenDelta]]:
        """What the rows of the newest planned step, whose plan is ``masked``, may draw. All steps before must be applied.

        Also the last deltas of sequences for which no token is left: they end here, well or not.
        """
        places = [i for i, seq in enumerate(self.in_flight[-1].sampled) if seq.matcher is not None and seq.status is not Status.FINISHED]
        followers = [self.in_flight[-1].sampled[i] for i in places]
        bits, stuck = grammars.masks(followers)
        deltas: list[TokenDelta] = []
        for seq in stuck:
            if seq.status is Status.FINISHED:  # with a sibling
                continue
            if seq.matcher.may_end:
                self._end(seq)
                deltas.append(self._delta(seq, [], "stop"))
            else:
                self._fail(seq, deltas)
        return TokenMasks(places, bits), deltas

    def _fail(self, seq: Sequence, deltas: list[TokenDelta]) -> None:
        """End the request of a sequence that can't go on in its grammar."""
        live, message = seq.request.live, seq.matcher.complaint
        for each in reversed(live):
            self._end(each)
        deltas.extend(self._delta(each, [], "error", error=message, error_status=400) for each in live)

    def _apply_errors(self, record: StepRecord, result: StepResult, deltas: list[TokenDelta]) -> None:
        """End the requests whose rows the executor could not run; the others go on."""
        owners = dict(zip(result.rows, record.sampled, strict=True))
        owners.update((chunk.advance.row, chunk.seq) for chunk in record.chunks)
        for row, message in result.errors.items():
            if row not in owners:
                raise RuntimeError(f"the executor reports an error for row {row}, which step {record.step} does not name: {message}")
            live = owners[row].request.live
            for seq in reversed(live):
                self.kv.distrust(seq)
                self._end(seq)
            deltas.extend(self._delta(seq, [], "error", error=message) for seq in live)

    def _apply_prompts(self, record: StepRecord, result: StepResult, deltas: list[TokenDelta]) -> None:
        """Gather prompt log-probabilities, count finished prompts, and end those that wanted nothing more."""
        for chunk in record.chunks:
            advance, seq = chunk.advance, chunk.seq
            request = seq.request
            live = request.live
            if not live:
                continue
            if advance.next_token_ids is not None:
                request.gather_prompt_logprobs(advance.start, result.prompt_logprobs[advance.row])
            end = advance.start + advance.count
            if end == seq.num_prompt and seq.num_outputs == 0:  # not when it is run again after a preemption
                self.stats.prompt_tokens += end
            if end == seq.num_prompt == seq.max_length:  # max_tokens is 0
                for each in reversed(live):
                    self._end(each)
                if request.pooling is not None:
                    deltas.append(self._delta(seq, [], "stop"))
                    deltas[-1].embedding = result.pooled[advance.row]
                    continue
                entries = request.take_prompt_logprobs()
                deltas.extend(self._delta(each, [], "length", entries if each is live[0] else None) for each in live)

    # -- ends -----------------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence) -> None:
        """The one way out, whatever the reason: frees row and blocks and forgets the sequence, and last the request.

        A sequence that ends while it computes its request's prompt hands the work over to the next one.
        """
        request, status = seq.request, seq.status
        if status is not Status.HELD:
            members = self.running if status is Status.RUNNING else self.waiting
            members.remove(seq)
            held = request.held if len(request.sequences) > 1 else ()
            if held:
                heir = held[0]
                heir.status = status
                heir.tokens = list(heir.tokens)
                self.kv.hand_over(seq, heir)
                members.add(heir)
        self.kv.release(seq, self._last_step)
        self._free_row(seq)
        seq.status = Status.FINISHED
        self._num_following -= seq.matcher is not None
        if not request.live:
            del self.requests[request.id]

    def _free_row(self, seq: Sequence) -> None:
        if seq.row >= 0:
            heapq.heappush(self.free_rows, seq.row)
            seq.row = -1
            seq.row_ready = False

    @staticmethod
    def _delta(
        seq: Sequence,
        token_ids: list[int],
        finish_reason: FinishReason,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        error_status: int = 500,
    ) -> TokenDelta:
        return TokenDelta(
            request_id=seq.request.id,
            index=seq.index,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=seq.request.num_cached_tokens,
            error=error,
            error_status=error_status,
        )

    def check(self, source: GenerateRequest) -> int:
        """RequestError for a request that can never finish here; else its longest length, prompt and output, in tokens."""
        settings, params = self.settings, source.params
        num_prompt = len(source.prompt_token_ids)
        if source.request_id in self.requests:
            raise RequestError(f"a request with the id {source.request_id!r} is running already; choose another.", param="request_id")
        if num_prompt == 0:
            raise RequestError("the prompt is empty; it must have at least one token.", param="prompt")
        if num_prompt + (params.max_tokens > 0) > settings.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, and the longest sequence is {settings.max_model_len} tokens, prompt and output "
                "together; shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.max_tokens < 0:
            raise RequestError(f"max_tokens must not be negative, got {params.max_tokens}.", param="max_tokens")
        if not 1 <= params.n <= settings.max_num_seqs:
            raise RequestError(
                f"n is {params.n}, but at most {settings.max_num_seqs} sequences can run at the same time; ask for fewer "
                "(or raise --max-num-seqs).",
                param="n",
            )
        max_length = min(num_prompt + params.max_tokens, settings.max_model_len)
        needed = self.kv.blocks_for(max(num_prompt, max_length - 1))  # the last token drawn is never run
        if needed > settings.num_blocks:
            raise RequestError(
                f"the request may need {needed} KV blocks for {max_length} tokens, and the cache has {settings.num_blocks} blocks "
                f"of {settings.block_size} tokens; lower max_tokens or shorten the prompt (or raise the KV cache memory).",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_length
