"""The chain's dynamic program on GPT-like chains: quality and seconds by number of buckets.

    python -m benchmarks.chain_dp [--share 0.3] [--layers 25 100 200] [--buckets 500 1000 0]

Embedding, halves of layers with attention written out, head; options enumerated, roofline prices.
Limit: a share of what the chain needs if every block keeps everything. Overhead: iteration time
of the decoded sequence over one execution of every node, as the chain counts it (stitching
can only lower it). Bound: no sequence of the recurrence is faster, by as many buckets. 0 buckets:
as many as `bucket_count` chooses. Seconds are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.chain_bound import lower_bound_ns, optimistic_table
from rockplan.dp.links import Link, Operation, RunForward, RunOption, links
from rockplan.dp.recurrence import bucket_count, decode, fastest_need, grid, minimum_needs, solve
from rockplan.dp.segments import intern_segments
from rockplan.values.graph import Phase
from testing.families import families, gpt_problems, join


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--layers", type=int, nargs="+", default=[25, 100, 200])
    parser.add_argument("--buckets", type=int, nargs="+", default=[500, 1000, 0])
    parser.add_argument("--different", type=int, default=50, help="layers, no two blocks alike")
    arguments = parser.parse_args()
    print("blocks  segments  buckets  overhead   bound  seconds  decode  minimum  peak MB")
    for layers in arguments.layers:
        report(gpt_links(layers), arguments.share, arguments.buckets)
    if arguments.different:
        print("all blocks different:")
        report(unalike(gpt_links(arguments.different)), arguments.share, arguments.buckets)


def gpt_links(layers: int) -> tuple[Link, ...]:
    graph, blocks = join(gpt_problems(layers))
    return links(blocks, families(blocks, small_bytes=8192))


def unalike(chain: Sequence[Link]) -> tuple[Link, ...]:
    """The same chain, each block with a few bytes of its own to hold."""
    return tuple(replace(link, background_bytes=8 * k) for k, link in enumerate(chain))


def report(chain: tuple[Link, ...], share: float, counts: Sequence[int]) -> None:
    segments = intern_segments(chain)
    needs = minimum_needs(segments)
    full_bytes = fastest_need(segments)
    limit_bytes = int(full_bytes * share)
    base_ns = sum(link.first.held[0].time_ns for link in chain)
    for count in counts:
        buckets = grid(limit_bytes, count or bucket_count(segments.blocks, len(segments.spans)))
        start = time.process_time()
        table = solve(segments, buckets, needs)
        solved = time.process_time()
        operations = decode(table, limit_bytes)
        decoded = time.process_time()
        optimistic = optimistic_table(segments, buckets, needs)
        bound_ns = lower_bound_ns(optimistic, limit_bytes)
        assert bound_ns is not None
        print(
            f"{len(chain):6}  {len(segments.spans) - 1:8}  {buckets.count:7}"
            f"  {time_ns(chain, operations) / base_ns - 1:8.4f}"
            f"  {bound_ns / base_ns - 1:6.4f}  {solved - start:7.2f}  {decoded - solved:6.3f}"
            f"  {needs[segments.whole] / full_bytes:7.4f}"
            f"  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:7.0f}",
            flush=True,
        )


def time_ns(chain: Sequence[Link], operations: Sequence[Operation]) -> int:
    """What the chain counts for `operations`."""
    total, seen = 0, set()
    for position, operation in enumerate(operations):
        link, again = chain[operation.block], operation.block in seen
        if isinstance(operation, RunForward):
            total += (link.again_forward if again else link.first_forward).time_ns
        elif operation.phase is Phase.FORWARD:
            after = operations[position + 1]
            closes = isinstance(after, RunOption) and after.block == operation.block
            costs = link.first if not again else link.closing if closes else link.again
            total += next(c.time_ns for c in costs.held if c.option == operation.option)
        seen.add(operation.block)
    return total


if __name__ == "__main__":
    main()
