# SPDX-License-Identifier: Apache-2.0
"""A worker whose pages hold names, and which checks each page that a step reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace

import torch
from vllm.v1.outputs import ModelRunnerOutput

from entropykv_vllm.attention.split import hot_starts, split
from entropykv_vllm.pages.moves import PageMove
from entropykv_vllm.pages.waves import apart
from entropykv_vllm.plan.request import Control, request_plan
from entropykv_vllm.plan.schedule import TierPlan, hot_start
from entropykv_vllm.serving.tables import tables_of
from entropykv_vllm.serving.worker import EvictionWorkerMixin, PagesInRows, TierLayers

from .contents import LOST, ZERO, Cold, Content, Expected, Held, Hot, Makers, extended
from .rows import RowsV1, RowsV2

#: Gives the token after a prefix of a request, by its name and the prefix's number.
Model = Callable[[str, int], int]


@dataclass
class Read:
    """The tokens of a request that the worker knows.

    Of each prefix there are two numbers: of its tokens alone, by which a model answers, and one
    that says what was evicted, too.
    """

    known: InitVar[list[int]]
    prompt: int
    tiers: list[Expected]
    tokens: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)

    def __post_init__(self, known: list[int]) -> None:
        for token in known:
            self.append(token)

    def append(self, token: int) -> None:
        at, before = len(self.tokens), self.prefixes[-1] if self.prefixes else 0
        if at % self.tiers[0].plan.interval == 0:
            old = tuple(tier.old(self.prefixes, at) for tier in self.tiers)
            before = extended(before, self.tiers[0].makers.state(old))
        self.tokens.append(token)
        self.plain.append(extended(self.plain[-1] if self.plain else 0, token))
        self.prefixes.append(extended(before, token))

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.plain[length:], self.prefixes[length:]


class Worker(EvictionWorkerMixin):
    """Our mixin over a model runner and a cache that are not there.

    Args:
        groups: of each page group, its plan, or the length of its sliding window.
        cleared: groups that get cleared pages.
        model: what requests answer.
        asked: what a request asked for, by its name.
        v2: whether the rows are those of the V2 runner.
        seats, longest: the most requests of a step, and the most tokens of a request.
    """

    def __init__(
        self,
        groups: Sequence[TierPlan | int],
        page: int,
        cleared: Iterable[int],
        model: Model,
        asked: Callable[[str], Control],
        v2: bool,
        seats: int,
        longest: int,
    ) -> None:
        self._warming_up, self._checksums = False, None
        self._view = SimpleNamespace(note=lambda output: None)
        self.groups, self.page, self.cleared = groups, page, set(cleared)
        self.model, self.asked = model, asked
        plans = {g: plan for g, plan in enumerate(groups) if isinstance(plan, TierPlan)}
        makers = Makers()
        self.plans, self.makers = plans, makers
        self._expected: dict[Control, dict[int, Expected]] = {}
        self.starts = {g: hot_starts(plan, longest) for g, plan in plans.items()}
        self._tier_layers = {g: TierLayers(plan, [None], [None]) for g, plan in plans.items()}
        self.rows = (RowsV2 if v2 else RowsV1)(len(groups), seats, -(-longest // page) + 1)
        self._tables = tables_of(self.rows)
        self.content: dict[int, Content] = {}
        #: Pages that held codes and were neither cleared nor filled since.
        self.codes: set[int] = set()
        self.requests: dict[str, Read] = {}
        self._last_order = -1

    # -- a step --------------------------------------------------------------------------------

    def step(self, output) -> ModelRunnerOutput:
        """What a worker is told to do in a step, and what it answers."""
        return self._after_moves(self._execute, output)

    def lose(self, pages: Iterable[int]) -> None:
        """Pages that are free, and not in the prefix cache: nobody may read them any more."""
        self.content.update(dict.fromkeys(pages, LOST))

    def _carry_out(self, moves: list[PageMove], new: set[str]) -> None:
        self._check_order(moves)
        self._check_rows([move for move in moves if move.request_id not in new])
        super()._carry_out(moves, new)

    def _check_order(self, moves: list[PageMove]) -> None:
        for move in moves:
            assert move.order > self._last_order, "a move is carried out twice, or out of order"
            self._last_order = move.order

    def _check_rows(self, moves: list[PageMove]) -> None:
        """Each move reads the pages that stand in the row, after the moves before it."""
        rows = {move.request_id: self.rows.known(move.request_id) for move in moves}
        rows = {name: row and [list(pages) for pages in row] for name, row in rows.items()}
        for move in moves:
            assert rows[move.request_id] is not None, "a move of a request that is not known"
            row = rows[move.request_id][move.group]
            read = [row[entry] for entry in move.entries]
            assert read == list(move.src), "a move reads other pages than the row has"
            for entry, page in move.rewritten.items():
                row[entry] = page

    def _move_pages(self, moves: list[PageMove]) -> None:
        for move in moves:
            self._write_all([self._made(move)])

    def _made(self, move: PageMove) -> tuple[PageMove, list[Content]]:
        plan = self._tier_layers[move.group].plan
        read = tuple(self.content[page] for page in move.src)
        for one in read:
            assert one is not LOST, "a move reads a page that was free"
            full = isinstance(one, Cold) or len(one.prefixes) == plan.page
            assert full, "a move reads a page that is not full"
            codes = isinstance(one, Cold) and one.bits < 16
            assert codes == (plan.bits < 16 and move.kind != "collapse"), "codes read as numbers"
        return move, self.makers.made(move.group, plan.bits, move, read)

    def _write_all(self, made: Iterable[tuple[PageMove, list[Content]]]) -> None:
        for move, contents in made:
            assert 0 not in move.dst, "a move writes to the null page"
            self.content.update(zip(move.dst, contents, strict=True))
            coded = self._tier_layers[move.group].plan.bits < 16
            (self.codes.update if coded else self.codes.difference_update)(move.dst)

    def _execute(self, output) -> ModelRunnerOutput:
        self.rows.update(output)
        for page in output.new_block_ids_to_zero or ():
            self.content[page] = ZERO
            self.codes.discard(page)
        steps = self._learn(output)
        self._write(steps)
        self._read(steps)
        sampled = [self._sample(name, end) for name, _, end in steps]
        places = {name: place for place, (name, _, _) in enumerate(steps)}
        return ModelRunnerOutput([*places], places, sampled)

    # -- tokens --------------------------------------------------------------------------------

    def _learn(self, output) -> list[tuple[str, int, int]]:
        """Note what is known of the step's requests; of each its name, first token and end."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        starts, cached = {}, output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            known = new.prefill_token_ids or new.prompt_token_ids
            tiers = [*self.expected(new.req_id).values()]
            self.requests[new.req_id] = Read(known, len(new.prompt_token_ids), tiers)
            starts[new.req_id] = new.num_computed_tokens
        for name, start, answered in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            self._go_on(name, answered, cached.all_token_ids.get(name))
            starts[name] = start
        counts = output.num_scheduled_tokens
        assert starts.keys() == counts.keys()
        return [(name, start, start + counts[name]) for name, start in starts.items()]

    def _go_on(self, name: str, answered: int, told: list[int] | None) -> None:
        """A request that goes on; where it was away, the scheduler says what it answered."""
        request = self.requests[name]
        if told is not None:
            length = min(len(told), len(request.tokens))
            assert told[:length] == request.tokens[:length], "other tokens were answered"
        request.cut(request.prompt + answered)
        assert len(request.tokens) == request.prompt + answered, "a token is missing"

    def _sample(self, name: str, end: int) -> list[int]:
        """The next token, if all that there are were read."""
        request = self.requests[name]
        assert end <= len(request.tokens)
        if end < len(request.tokens):
            return []
        request.append(self.model(name, request.plain[-1]))
        return [request.tokens[-1]]

    # -- pages ---------------------------------------------------------------------------------

    def _write(self, steps: list[tuple[str, int, int]]) -> None:
        """Put the new tokens of all requests into their pages, as all layers do at once."""
        written: set[int] = set()
        for name, start, end in steps:
            for group in range(len(self.groups)):
                row = self.rows.read(name, group)
                for entry in range(start // self.page, -(-end // self.page)):
                    page = int(row[entry])
                    assert page not in written | {0}, "a page is written twice, or the null page"
                    written.add(page)
                    self._write_page(group, name, entry, page, (start, end))

    def _write_page(self, group: int, name: str, entry: int, page: int, step) -> None:
        (start, end), prefixes = step, self.requests[name].prefixes
        first, last = entry * self.page, min(end, (entry + 1) * self.page)
        if start > first:  # behind them may be what a step wrote that was taken back
            there, before = self.content.get(page), tuple(prefixes[first:start])
            kept = there.prefixes[: len(before)] if isinstance(there, Hot) else None
            own = kept == before and there.group == group
            assert own, f"{name} goes on at {start} in a page that holds {there}"
        self.content[page] = Hot(group, tuple(prefixes[first:last]))
        if last - first == self.page:
            self.codes.discard(page)

    def _read(self, steps: list[tuple[str, int, int]]) -> None:
        for group, kind in enumerate(self.groups):
            if isinstance(kind, TierPlan):
                self._read_tier(group, kind, steps)
            else:
                for step in steps:
                    self._read_window(group, kind, *step)
            if group in self.cleared:
                for name, _, end in steps:
                    page = int(self.rows.read(name, group)[(end - 1) // self.page])
                    assert page not in self.codes, "codes lie behind the last token"

    def _read_window(self, group: int, window: int, name: str, start: int, end: int) -> None:
        row, first = self.rows.read(name, group), max(0, start - window + 1) // self.page
        prefixes = self.requests[name].prefixes
        for entry in range(first, -(-end // self.page)):
            last = min(end, (entry + 1) * self.page)
            there = self.content.get(int(row[entry]))
            assert there == Hot(group, tuple(prefixes[entry * self.page : last])), (
                f"entry {entry} of a sliding window of {name} holds {there}"
            )

    def _read_tier(self, group: int, plan: TierPlan, steps: list[tuple[str, int, int]]) -> None:
        """What attention reads, as our backends find it, is what the plan says, in its order."""
        if not steps:
            return
        rows = torch.stack([torch.from_numpy(self.rows.read(name, group)) for name, _, _ in steps])
        ends = torch.tensor([end for _, _, end in steps], dtype=torch.int32)
        counts = torch.tensor([end - start for _, start, end in steps], dtype=torch.int32)
        tables, cold, hot = (
            x.tolist() for x in split(plan, self.starts[group], rows, ends, counts)
        )
        for (name, start, end), table, some, tokens in zip(steps, tables, cold, hot, strict=True):
            expected = self._held(group, name, start, end)
            pages = table[: some + -(-tokens // plan.page)]
            there = [self.content.get(page) for page in pages]
            planned = [expected[entry] for entry in sorted(expected)]
            assert there == planned, (
                f"{name} reads other pages in tier {plan.name} than the plan says, at {start}: "
                f"{there}, not {planned}"
            )
            own = self.expected(name)[group].plan
            first = hot_start(own, start // plan.interval * plan.interval)
            old = sum(entry < first // plan.page for entry in expected)
            if plan.bits == 16:  # then it makes no difference, as there is one format
                tokens, first = tokens + some * plan.page, first - old * plan.page
                some = old = 0
            assert (some, tokens) == (old, end - first), "cold pages are taken for hot ones"

    def _held(self, group: int, name: str, start: int, end: int) -> Held:
        """What a step of a request reads in a group, its own tokens included."""
        prefixes, tier = self.requests[name].prefixes, self.expected(name)[group]
        own = tier.hot(prefixes, start // self.page * self.page, end)
        return tier.before(prefixes, start) | own

    def expected(self, name: str) -> dict[int, Expected]:
        """By group, what the tiers hold of a request, in the way that it asked for."""
        asked = self.asked(name)
        if asked not in self._expected:
            self._expected[asked] = {
                g: Expected(g, request_plan(plan, asked), self.makers)
                for g, plan in self.plans.items()
            }
        return self._expected[asked]


class WorkerInWaves(PagesInRows, Worker):
    """As on GPUs: a call reads all its pages before it writes, or in any order where it may."""

    def __init__(self, *args, rng: random.Random, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.rng = rng

    def _move_pages(self, moves: list[PageMove]) -> None:
        moves = self.rng.sample(moves, len(moves))
        if apart(moves):
            for move in moves:
                self._write_all([self._made(move)])
        else:
            self._write_all([self._made(move) for move in moves])
