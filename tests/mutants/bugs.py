# SPDX-License-Identifier: Apache-2.0
"""The bugs: what is put in place of what, and which tests are asked to catch it."""

from __future__ import annotations

from dataclasses import dataclass

CONTROL = "tests/control/test_control.py"
MANAGER = "entropykv_vllm/pages/manager.py"
HITS = "entropykv_vllm/pages/hits.py"
WAVES = "entropykv_vllm/pages/waves.py"
PLAN = "entropykv_vllm/plan/schedule.py"
SCHEDULER = "entropykv_vllm/serving/scheduler.py"
WORKER = "entropykv_vllm/serving/worker.py"
SPLIT = "entropykv_vllm/attention/split.py"


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        name: what goes wrong, in words.
        file: where.
        old: what stands there, once in the file.
        new: what is put in its place.
        tests: a file of tests that must catch it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str = CONTROL

    @property
    def compiled(self) -> bool:
        """Whether the kernels must be built anew."""
        return self.file.startswith("csrc/")

    def put_into(self, text: str) -> str:
        """The text of the file with the bug.

        Raises:
            ValueError: if the place is not there, or there more than once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has changed, and '{self.name}' fits no more")
        return text.replace(self.old, self.new)


BUGS = [
    Bug(
        "survivors are written over pages that others share",
        MANAGER,
        "if all(block.ref_cnt == 1 for block in own):",
        "if all(block.ref_cnt >= 1 for block in own):",
    ),
    Bug(
        "a page that is written over is still found by its old name",
        MANAGER,
        "                self._forget(own)\n",
        "",
    ),
    Bug(
        "old pages are kept where survivors are copied",
        MANAGER,
        "freed = [block for block in src if block not in dst]",
        "freed = src[len(dst) :]",
    ),
    Bug(
        "a request that found no page to copy to goes on",
        MANAGER,
        "self._stuck.add(request_id)",
        "pass",
        "tests/pages/test_manager_model.py",
    ),
    Bug(
        "a move is planned again after a request was stuck",
        MANAGER,
        "            progress.moves_done += 1\n",
        "",
        "tests/pages/test_manager_model.py",
    ),
    Bug(
        "moves of the boundary before count for this one",
        MANAGER,
        "self.at, self.moves_done = at, 0",
        "self.at = at",
    ),
    Bug(
        "the moves of a request that is gone are sent",
        MANAGER,
        "self._moves = [move for move in self._moves if move.request_id != request_id]",
        "pass",
    ),
    Bug(
        "pages that were never written are found",
        MANAGER,
        "self._forget(self._unwritten.pop(request_id, ()))",
        "self._unwritten.pop(request_id, ())",
        "tests/pages/test_manager_model.py",
    ),
    Bug(
        "adopted pages are not counted as held",
        MANAGER,
        "self.block_pool.touch([block for block in new_computed_blocks if not block.is_null])",
        "pass",
    ),
    Bug(
        "the pages of a segment have one name",
        HITS,
        'f"/{page.kind}/{page.index}"',
        'f"/{page.kind}"',
    ),
    Bug(
        "a hit may end before its boundary",
        HITS,
        "if hit >= max(at, plan.page):",
        "if hit > 0:",
    ),
    Bug(
        "a hit goes on past the next boundary",
        HITS,
        "end = min(limit, at + plan.interval - plan.page)",
        "end = limit",
    ),
    Bug(
        "a step crosses a boundary",
        SCHEDULER,
        "return min(num_new_tokens, self._interval - into)",
        "return num_new_tokens",
    ),
    Bug(
        "pages are moved under a step in flight",
        SCHEDULER,
        "request.num_in_flight_tokens > 0",
        "request.num_in_flight_tokens > 1000",
    ),
    Bug(
        "moves travel tier by tier",
        SCHEDULER,
        "        moves.sort(key=lambda move: move.order)\n",
        "",
    ),
    Bug(
        "moves are carried out after the step",
        WORKER,
        """        self._carry_out(moves, new)
        result = execute_model(scheduler_output, *args, **kw)
""",
        """        result = execute_model(scheduler_output, *args, **kw)
        self._carry_out(moves, new)
""",
    ),
    Bug(
        "the row of a new request is rewritten",
        WORKER,
        "if request_id not in new:",
        "if True:",
        "tests/serving/test_steps.py",
    ),
    Bug(
        "a row in the batch is not rewritten",
        "entropykv_vllm/serving/tables.py",
        "table[row, list(entries)] = list(entries.values())",
        "pass",
    ),
    Bug(
        "a page is written in the call that still reads it",
        WAVES,
        "return max([0, *after, *beside])",
        "return max([0, *after])",
    ),
    Bug(
        "pages with survivors are cleared",
        "entropykv_vllm/serving/clearing.py",
        "return [page for page in pages if page not in written]",
        "return pages",
        "tests/serving/test_clearing.py",
    ),
    Bug(
        "what lies behind a row is read",
        SPLIT,
        "kept = (column < pages[:, None]) & (block_table != 0)",
        "kept = block_table != 0",
        "tests/attention/test_split.py",
    ),
    Bug(
        "a step's end says what is cold",
        SPLIT,
        "before = (seq_lens - query_lens).clamp(min=0)",
        "before = seq_lens",
    ),
    Bug(
        "the window is not kept",
        PLAN,
        "return max(0, at - plan.window) // plan.segment",
        "return at // plan.segment",
        "tests/plan/test_schedule.py",
    ),
    Bug(
        "the peak is that of boundaries alone",
        PLAN,
        "held = (held_pages(plan, at, at + plan.interval) for at in starts)",
        "held = (held_pages(plan, at, at) for at in starts)",
        "tests/plan/test_schedule.py",
    ),
    Bug(
        "the first tokens are not kept by merges",
        PLAN,
        'found.append(Move(src, dst, plan.sinks if start == 0 else 0, "merge"))',
        'found.append(Move(src, dst, 0, "merge"))',
        "tests/plan/test_schedule.py",
    ),
    Bug(
        "a token sees the one after it",
        "entropykv_vllm/kernels/reference.py",
        "hidden = torch.arange(tokens, device=query.device) > position[:, None]",
        "hidden = torch.arange(tokens, device=query.device) > position[:, None] + 1",
        "tests/kernels/test_reference.py",
    ),
    Bug(
        "survivors are not in the order of their positions",
        "entropykv_vllm/kernels/select.py",
        "return cost.argsort(dim=-1, stable=True)[..., :keep].sort(-1).values",
        "return cost.argsort(dim=-1, stable=True)[..., :keep]",
        "tests/kernels/test_select.py",
    ),
    Bug(
        "kernels: survivors are not in the order of their positions",
        "csrc/cpu/select.h",
        "  std::sort(order.begin(), order.end());\n",
        "",
        "tests/kernels/test_native.py",
    ),
    Bug(
        "kernels: the zero of 4 bits is above the lowest number",
        "csrc/cpu/pages.h",
        "a.zero = half_down(low);",
        "a.zero = half_up(low);",
        "tests/kernels/test_native.py",
    ),
    Bug(
        "kernels: a softmax is not shrunk when its maximum grows",
        "csrc/cpu/attention.h",
        "      rows.state.sum[r] *= shrink;\n",
        "",
        "tests/kernels/test_native.py",
    ),
    Bug(
        "kernels: the rows of a call may begin before its queries",
        "csrc/ops.cpp",
        "batch.starts[0] >= 0 && ",
        "",
        "tests/kernels/test_arguments.py",
    ),
    Bug(
        "kernels: page numbers are written over once they were checked",
        "csrc/ops.cpp",
        "  check_apart({&starts, &table, &cold, &hot}, output);\n",
        "",
        "tests/kernels/test_arguments.py",
    ),
]
